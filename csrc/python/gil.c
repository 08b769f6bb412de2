/* gil.c - the core runs without the GIL, asks a function for times, and Ctrl-C ends its searches.
 */
#include <time.h>

#include "glue.h"

enum { LOOKS_A_SECOND = 10 };
#define TIME_MAX ((int64_t)1 << 42)

static double seconds(void) {
  struct timespec now;
  timespec_get(&now, TIME_UTC);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Whether a signal's handler has raised: its exception stays. Handlers run on the main thread
 * alone. Few looks, as other threads may keep the GIL for a while. */
static int32_t stopped(void *context) {
  hcp_py_gil *gil = context;
  if (gil->held) gil->state = PyEval_SaveThread();
  gil->held = 0;
  double now = seconds(), since = now - gil->looked;
  if (gil->raised || (since >= 0 && since < 1.0 / LOOKS_A_SECOND)) return gil->raised;
  gil->looked = now;
  PyEval_RestoreThread(gil->state);
  gil->raised = PyErr_CheckSignals() < 0;
  gil->state = PyEval_SaveThread();
  return gil->raised;
}

void hcp_py_drop_gil(hcp_py_gil *gil, PyObject *reads) {
  *gil = (hcp_py_gil){.stop = {stopped, gil},
                      .reads = reads == NULL ? NULL : Py_NewRef(reads),
                      .looked = seconds()};
  gil->state = PyEval_SaveThread();
}

/* -1: an exception is set. */
static int64_t call(PyObject *function, int64_t length, int32_t degree) {
  int64_t time = -1;
  PyObject *result = PyObject_CallFunction(function, "Li", (long long)length, (int)degree);
  if (result == NULL) return -1;
  int read = hcp_py_int64(result, "the time of a cost function", &time);
  Py_DECREF(result);
  if (read < 0) return -1;
  if (time >= 1 && time <= TIME_MAX) return time;
  PyErr_Format(PyExc_ValueError,
               "the cost function gave %lld units for %lld tokens on %d ranks, expected 1 to 2^42: "
               "choose a larger unit",
               (long long)time, (long long)length, (int)degree);
  return -1;
}

int64_t hcp_py_time(void *context, int64_t length, int32_t degree) {
  hcp_py_gil *gil = context;
  if (gil->raised) return 1;
  if (!gil->held) PyEval_RestoreThread(gil->state);
  gil->held = 1;
  int64_t time = call(gil->function, length, degree);
  gil->raised = time < 0;
  return time < 0 ? 1 : time;
}

int hcp_py_take_gil(hcp_py_gil *gil) {
  if (!gil->held) PyEval_RestoreThread(gil->state);
  Py_XDECREF(gil->reads);
  return gil->raised;
}
