/* holders.c - find_holders: finds those of some objects that refer to certain others.
 *
 * gc.get_referrers searches the collector's list. A dictionary or a tuple of
 * objects that cannot form cycles, such as process groups, is not on it. Here
 * these are searched, too, through the objects that hold them. */
#include <stdlib.h>

#include "glue.h"

/* Untracked tuples and dictionaries inside each other, at most. */
enum { DEEPEST = 200 };

typedef struct search {
  PyObject **targets; /* ascending */
  Py_ssize_t n;
  PyObject *opaque; /* a tuple of types */
  PyObject *found;
  PyObject *holder; /* what is being looked into, borrowed */
  int depth;
} search;

static int by_address(const void *a, const void *b) {
  uintptr_t x = (uintptr_t)*(PyObject *const *)a, y = (uintptr_t)*(PyObject *const *)b;
  return (x > y) - (x < y);
}

static int is_target(const search *s, PyObject *value) {
  return bsearch(&value, s->targets, (size_t)s->n, sizeof *s->targets, by_address) != NULL;
}

static int is_opaque(const search *s, PyObject *value) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(s->opaque); i++)
    if (PyTuple_GetItem(s->opaque, i) == (PyObject *)Py_TYPE(value)) return 1;
  return 0;
}

static int is_untracked(PyObject *value) {
  return (PyDict_CheckExact(value) || PyTuple_CheckExact(value)) && !PyObject_GC_IsTracked(value);
}

static int visit(PyObject *value, void *context);

static int look_into(search *s, PyObject *holder) {
  traverseproc traverse = (traverseproc)(uintptr_t)PyType_GetSlot(Py_TYPE(holder), Py_tp_traverse);
  PyObject *outer = s->holder;
  if (traverse == NULL || s->depth >= DEEPEST) return 0;
  s->holder = holder;
  s->depth++;
  int status = traverse(holder, visit, s);
  s->depth--;
  s->holder = outer;
  return status;
}

static int add_pair(search *s, PyObject *holder, PyObject *target) {
  if (PyList_Append(s->found, holder) < 0) return -1;
  return PyList_Append(s->found, target);
}

/* Runs no Python code and starts no collection: the holder stays as it is. */
static int visit(PyObject *value, void *context) {
  search *s = context;
  if (is_target(s, value)) return add_pair(s, s->holder, value);
  if (is_opaque(s, value)) return add_pair(s, value, Py_None);
  return is_untracked(value) ? look_into(s, value) : 0;
}

static int take_targets(search *s, PyObject *targets) {
  s->n = PyTuple_Size(targets);
  s->targets = PyMem_Calloc((size_t)s->n + 1, sizeof *s->targets);
  if (s->targets == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t i = 0; i < s->n; i++) s->targets[i] = PyTuple_GetItem(targets, i);
  qsort(s->targets, (size_t)s->n, sizeof *s->targets, by_address);
  return 0;
}

static PyObject *find_holders(PyObject *module, PyObject *args) {
  PyObject *objects, *targets;
  search s = {0};
  (void)module;
  if (!PyArg_ParseTuple(args, "O!O!O!:find_holders", &PyList_Type, &objects, &PyTuple_Type,
                        &targets, &PyTuple_Type, &s.opaque))
    return NULL;
  if (take_targets(&s, targets) < 0) return NULL;
  s.found = PyList_New(0);
  for (Py_ssize_t i = 0; s.found != NULL && i < PyList_Size(objects); i++) {
    PyObject *holder = PyList_GetItem(objects, i);
    /* No other has a traversal that may be called: that of a static type aborts. */
    if ((PyObject_GC_IsTracked(holder) || is_untracked(holder)) && look_into(&s, holder) < 0)
      Py_CLEAR(s.found);
  }
  PyMem_Free(s.targets);
  return s.found;
}

static PyMethodDef holders_methods[] = {
    {"find_holders", find_holders, METH_VARARGS,
     "find_holders(objects, targets, opaque, /)\n--\n\n"
     "[holder, target, ...]: each reference from one of `objects`, a list as gc.get_objects gives\n"
     "it, or from a dictionary or tuple in there that the collector does not track, to one of\n"
     "`targets`; and [x, None] for each x of a type in `opaque` that one of them refers to."},
    {NULL, NULL, 0, NULL}};

int hcp_py_add_holders(PyObject *module) { return PyModule_AddFunctions(module, holders_methods); }
