/* holders.c - tracked_objects: what the collector tracks, for one to hold safely.
 *
 * To hold a tuple that another thread is making fails there with a SystemError:
 * only its one owner may fill it. Nothing refers to it yet. So a tuple is handed
 * out if something refers to it, and no thread runs in between.
 *
 * find_holders: finds those of some objects that refer to certain others.
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

/* Call visit with each object that the holder refers to, until it returns a number but 0. */
static int visit_referents(PyObject *holder, visitproc visit, void *context) {
  traverseproc traverse = (traverseproc)(uintptr_t)PyType_GetSlot(Py_TYPE(holder), Py_tp_traverse);
  return traverse == NULL ? 0 : traverse(holder, visit, context);
}

static int visit(PyObject *value, void *context);

static int look_into(search *s, PyObject *holder) {
  PyObject *outer = s->holder;
  if (s->depth >= DEEPEST) return 0;
  s->holder = holder;
  s->depth++;
  int status = visit_referents(holder, visit, s);
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

/* What only its one owner may change, and which of it something refers to. */
typedef struct made_by_one {
  PyObject **values; /* ascending */
  unsigned char *held;
  Py_ssize_t n;
} made_by_one;

static int is_made_by_one(PyObject *value) {
  return PyTuple_CheckExact(value) || PyFrozenSet_CheckExact(value);
}

static Py_ssize_t index_of(const made_by_one *made, PyObject *value) {
  if (made->n == 0) return -1;
  PyObject **at = bsearch(&value, made->values, (size_t)made->n, sizeof *made->values, by_address);
  return at == NULL ? -1 : at - made->values;
}

static int mark_held(PyObject *value, void *context) {
  const made_by_one *made = context;
  Py_ssize_t i = is_made_by_one(value) ? index_of(made, value) : -1;
  if (i >= 0) made->held[i] = 1;
  return 0;
}

static int take_made_by_one(made_by_one *made, PyObject *objects) {
  Py_ssize_t n = PyList_Size(objects);
  made->values = PyMem_Calloc((size_t)n + 1, sizeof *made->values);
  made->held = PyMem_Calloc((size_t)n + 1, 1);
  if (made->values == NULL || made->held == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject *value = PyList_GetItem(objects, i);
    if (is_made_by_one(value)) made->values[made->n++] = value;
  }
  qsort(made->values, (size_t)made->n, sizeof *made->values, by_address);
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject *holder = PyList_GetItem(objects, i);
    if (holder != objects) (void)visit_referents(holder, mark_held, made);
  }
  return 0;
}

static int add_held(PyObject *kept, PyObject *objects, PyTypeObject *cls) {
  made_by_one made = {0};
  int may_be_made =
      PyType_IsSubtype(&PyTuple_Type, cls) || PyType_IsSubtype(&PyFrozenSet_Type, cls);
  int status = may_be_made ? take_made_by_one(&made, objects) : 0;
  for (Py_ssize_t i = 0; status == 0 && i < PyList_Size(objects); i++) {
    PyObject *value = PyList_GetItem(objects, i);
    Py_ssize_t at = is_made_by_one(value) ? index_of(&made, value) : -1;
    int is_asked = value != kept && PyType_IsSubtype(Py_TYPE(value), cls);
    if (is_asked && (at < 0 || made.held[at])) status = PyList_Append(kept, value);
  }
  PyMem_Free(made.values);
  PyMem_Free(made.held);
  return status;
}

/* From the call of get_objects to the release of its list no thread and no collection runs. */
static PyObject *tracked_objects(PyObject *module, PyObject *args) {
  PyTypeObject *cls = &PyBaseObject_Type;
  (void)module;
  if (!PyArg_ParseTuple(args, "|O!:tracked_objects", &PyType_Type, &cls)) return NULL;
  PyObject *kept = PyList_New(0), *collector = PyImport_ImportModule("gc"), *objects = NULL;
  if (kept != NULL && collector != NULL)
    objects = PyObject_CallMethod(collector, "get_objects", NULL);
  int status = objects == NULL ? -1 : add_held(kept, objects, cls);
  Py_XDECREF(objects);
  Py_XDECREF(collector);
  if (status < 0) Py_CLEAR(kept);
  return kept;
}

static PyMethodDef holders_methods[] = {
    {"tracked_objects", tracked_objects, METH_VARARGS,
     "tracked_objects(cls=object, /)\n--\n\n"
     "[object, ...]: those of a class that the collector tracks, without tuples and frozensets to\n"
     "which none of them refers: such a one may be in the making, and only its maker may hold it."},
    {"find_holders", find_holders, METH_VARARGS,
     "find_holders(objects, targets, opaque, /)\n--\n\n"
     "[holder, target, ...]: each reference from one of `objects`, as tracked_objects gives them,\n"
     "or from a dictionary or tuple in there that the collector does not track, to one of\n"
     "`targets`; and [x, None] for each x of a type in `opaque` that one of them refers to."},
    {NULL, NULL, 0, NULL}};

int hcp_py_add_holders(PyObject *module) { return PyModule_AddFunctions(module, holders_methods); }
