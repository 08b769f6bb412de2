/* link.c - Link: what lies where in memory that ranks have mapped; and the numbers and structures
 * of signals, by name. */
#include "hcp/link.h"

#include "glue.h"
#include "hcp/signal.h"

typedef struct link_object {
  PyObject_HEAD hcp_link *link;
} link_object;

static const hcp_link *link_of(PyObject *self) { return ((link_object *)self)->link; }

static PyObject *link_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  PyObject *given[3];
  int32_t rank;
  int64_t buffer_bytes, *bases;
  Py_ssize_t ranks;
  hcp_link *made;
  hcp_error err;
  (void)kwargs;
  if (!PyArg_ParseTuple(args, "OOO:Link", &given[0], &given[1], &given[2]) ||
      hcp_py_int32(given[0], "rank", &rank) < 0 ||
      hcp_py_int64(given[2], "buffer_bytes", &buffer_bytes) < 0 ||
      hcp_py_int64s(given[1], "bases", &bases, &ranks) < 0)
    return NULL;
  hcp_status status = hcp_link_create(rank, (int32_t)ranks, bases, buffer_bytes, &made, &err);
  PyMem_Free(bases);
  if (status != HCP_OK) return hcp_py_raise(&err);
  PyObject *self = PyType_GenericAlloc(type, 0);
  if (self == NULL)
    hcp_link_destroy(made);
  else
    ((link_object *)self)->link = made;
  return self;
}

static void link_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  hcp_link_destroy(((link_object *)self)->link);
  PyObject_Free(self);
  Py_DECREF(type);
}

static PyObject *link_counts(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromLongLong(hcp_link_counts(link_of(self)->ranks));
}

static PyObject *link_half_bytes(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromLongLong(link_of(self)->half_bytes);
}

static PyObject *link_rows(PyObject *self, PyObject *args) {
  static const char *const names[] = {"half", "rows", "row_bytes"};
  PyObject *given[3];
  int64_t values[3], begin;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "OOO:rows", &given[0], &given[1], &given[2])) return NULL;
  for (int i = 0; i < 3; i++)
    if (hcp_py_int64(given[i], names[i], &values[i]) < 0) return NULL;
  if (hcp_link_rows(link_of(self), values[0], values[1], values[2], &begin, &err) != HCP_OK)
    return hcp_py_raise(&err);
  return PyLong_FromLongLong(begin);
}

static hcp_status fill(const hcp_link *link, int which, const int64_t *places, Py_ssize_t n,
                       PyObject *bytes, hcp_error *err) {
  return hcp_link_signals_of(link, (hcp_link_signals)which,
                             (const hcp_link_place *)(const void *)places, n,
                             (hcp_signal *)(void *)PyByteArray_AsString(bytes), err);
}

static PyObject *link_signals(PyObject *self, PyObject *args) {
  int which;
  PyObject *given, *view = NULL;
  int64_t *places;
  Py_ssize_t n;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "iO:signals", &which, &given)) return NULL;
  if (which < 0 || which >= HCP_LINK_SIGNAL_COUNT)
    return PyErr_Format(PyExc_ValueError, "which is %d, expected 0 to %d", which,
                        HCP_LINK_SIGNAL_COUNT - 1);
  if (hcp_py_int64s(given, "places", &places, &n) < 0) return NULL;
  n /= 3;
  PyObject *bytes = PyByteArray_FromStringAndSize(NULL, n * (Py_ssize_t)sizeof(hcp_signal));
  if (bytes != NULL)
    view = fill(link_of(self), which, places, n, bytes, &err) == HCP_OK
               ? PyMemoryView_FromObject(bytes)
               : hcp_py_raise(&err);
  PyMem_Free(places);
  Py_XDECREF(bytes);
  return view;
}

static PyGetSetDef link_getset[] = {
    {"counts", link_counts, NULL, "Number of counts, which lie on the device.", NULL},
    {"half_bytes", link_half_bytes, NULL, "Bytes for the rows of one exchange.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMethodDef link_methods[] = {
    {"rows", link_rows, METH_VARARGS,
     "rows($self, half, rows, row_bytes, /)\n--\n\n"
     "The byte at which rows of a half begin. ValueError where they do not fit."},
    {"signals", link_signals, METH_VARARGS,
     "signals($self, which, places, /)\n--\n\n"
     "Signals as words, four each, of (peer, half, met) end to end."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot link_slots[] = {{Py_tp_new, HCP_PY_SLOT(link_new)},
                                   {Py_tp_dealloc, HCP_PY_SLOT(link_dealloc)},
                                   {Py_tp_getset, link_getset},
                                   {Py_tp_methods, link_methods},
                                   {Py_tp_doc,
                                    "Link(rank, bases, buffer_bytes, /)\n--\n\n"
                                    "A rank's end of memory that ranks have mapped, at bases."},
                                   {0, NULL}};

static PyType_Spec link_spec = {"hcp._core.Link", sizeof(link_object), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, link_slots};

/* ---- numbers ---- */

/* A list of them ends with a name that is NULL. */
typedef struct number {
  const char *name;
  int64_t value;
} number;

static PyObject *dict_of(const number *numbers) {
  PyObject *dict = PyDict_New();
  for (; dict != NULL && numbers->name != NULL; numbers++) {
    PyObject *value = PyLong_FromLongLong(numbers->value);
    if (value == NULL || PyDict_SetItemString(dict, numbers->name, value) < 0) Py_CLEAR(dict);
    Py_XDECREF(value);
  }
  return dict;
}

static PyObject *signal_tag(PyObject *module, PyObject *word) {
  (void)module;
  int64_t value;
  if (hcp_py_int64(word, "word", &value) < 0) return NULL;
  return PyLong_FromUnsignedLong(hcp_signal_tag((uint64_t)value));
}

static PyObject *link_bytes(PyObject *module, PyObject *args) {
  PyObject *given[2];
  int32_t ranks;
  int64_t buffer_bytes;
  (void)module;
  if (!PyArg_ParseTuple(args, "OO:link_bytes", &given[0], &given[1]) ||
      hcp_py_int32(given[0], "ranks", &ranks) < 0 ||
      hcp_py_int64(given[1], "buffer_bytes", &buffer_bytes) < 0)
    return NULL;
  return PyLong_FromLongLong(hcp_link_bytes(ranks, buffer_bytes));
}

static PyMethodDef functions[] = {
    {"signal_tag", signal_tag, METH_O, "The tag of a signal's word."},
    {"link_bytes", link_bytes, METH_VARARGS,
     "The memory that each of so many ranks needs, for words and for rows."},
    {NULL, NULL, 0, NULL}};

int hcp_py_add_link(PyObject *module) {
#define NUMBER(name, value) {#name, value},
#define FIELD(type, name) #name,
#define NAME(name) #name,
  static const number numbers[] = {HCP_SIGNAL_NUMBERS(NUMBER){NULL, 0}};
  static const char *const failure[] = {HCP_SIGNAL_FAILURE(FIELD)};
  static const char *const watch[] = {HCP_WATCH(FIELD)};
  static const char *const sets[] = {HCP_LINK_SIGNALS(NAME)};
#undef NUMBER
#undef FIELD
#undef NAME
  if (hcp_py_add_type(module, "Link", &link_spec) < 0 ||
      hcp_py_add_owned(module, "SIGNALS", dict_of(numbers)) < 0 ||
      hcp_py_add_names(module, "LINK_SIGNALS", sets, HCP_LINK_SIGNAL_COUNT) < 0 ||
      hcp_py_add_names(module, "SIGNAL_FAILURE", failure, sizeof failure / sizeof *failure) < 0 ||
      hcp_py_add_names(module, "WATCH", watch, sizeof watch / sizeof *watch) < 0)
    return -1;
  return PyModule_AddFunctions(module, functions);
}
