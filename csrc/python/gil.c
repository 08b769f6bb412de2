/* gil.c - the core runs without the GIL, and Ctrl-C ends its searches. */
#include <time.h>

#include "glue.h"

enum { LOOKS_A_SECOND = 10 };

static double seconds(void) {
  struct timespec now;
  timespec_get(&now, TIME_UTC);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Whether a signal's handler has raised: its exception stays. Handlers run on the main thread
 * alone. Few looks, as other threads may keep the GIL for a while. */
static int32_t stopped(void *context) {
  hcp_py_gil *gil = context;
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

int hcp_py_take_gil(hcp_py_gil *gil) {
  PyEval_RestoreThread(gil->state);
  Py_XDECREF(gil->reads);
  return gil->raised;
}
