/* gil.c - the core runs without the GIL, asks a function for times, and Ctrl-C ends its searches.
 */
#include <float.h>
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

static int64_t refuse_units(double units, int64_t length, int32_t degree) {
  PyObject *whole = PyLong_FromDouble(units);
  if (whole == NULL) return -1;
  PyErr_Format(PyExc_ValueError,
               "the cost function gave %R units for %lld tokens on %d ranks, expected 1 to 2^42: "
               "choose a larger unit",
               whole, (long long)length, (int)degree);
  Py_DECREF(whole);
  return -1;
}

/* The seconds that a function gave in units, rounded up. -1: an exception is set. */
static int64_t units_of(PyObject *given, double unit, int64_t length, int32_t degree) {
  double seconds = PyFloat_AsDouble(given);
  if (PyErr_Occurred()) return -1;
  if (!(seconds >= 0 && seconds <= DBL_MAX)) {
    PyErr_Format(PyExc_ValueError,
                 "the cost function gave %R for %lld tokens on %d ranks, expected seconds >= 0",
                 given, (long long)length, (int)degree);
    return -1;
  }
  double units = seconds / unit;
  if (units > (double)TIME_MAX) return refuse_units(units, length, degree);
  int64_t whole = (int64_t)units;
  whole += (double)whole < units;
  return whole > 0 ? whole : 1;
}

int64_t hcp_py_units(PyObject *function, double unit, int64_t length, int32_t degree) {
  PyObject *tokens = PyLong_FromLongLong(length), *ranks = PyLong_FromLong(degree);
  PyObject *given = NULL;
  if (tokens != NULL && ranks != NULL)
    given = PyObject_CallFunctionObjArgs(function, tokens, ranks, NULL);
  int64_t units = given == NULL ? -1 : units_of(given, unit, length, degree);
  Py_XDECREF(given);
  Py_XDECREF(ranks);
  Py_XDECREF(tokens);
  return units;
}

int64_t hcp_py_time(void *context, int64_t length, int32_t degree) {
  hcp_py_gil *gil = context;
  if (gil->raised) return 1;
  if (!gil->held) PyEval_RestoreThread(gil->state);
  gil->held = 1;
  int64_t time = hcp_py_units(gil->function, gil->unit, length, degree);
  gil->raised = time < 0;
  return time < 0 ? 1 : time;
}

int hcp_py_take_gil(hcp_py_gil *gil) {
  if (!gil->held) PyEval_RestoreThread(gil->state);
  Py_XDECREF(gil->reads);
  return gil->raised;
}
