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

static PyObject *link_mailbox_bytes(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromLongLong(link_of(self)->mailbox_bytes);
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

/* Ranks of a sequence, which the caller frees. */
static int ranks_from(PyObject *given, const char *name, const int64_t **ranks, int64_t *count) {
  int64_t *values;
  Py_ssize_t n;
  if (hcp_py_int64s(given, name, &values, &n) < 0) return -1;
  *ranks = values;
  *count = n;
  return 0;
}

static void free_read(hcp_link_read *read) {
  PyMem_Free((void *)(uintptr_t)read->owners);
  PyMem_Free((void *)(uintptr_t)read->done);
}

/* One read, of a pair (owners, done). */
static int read_from(PyObject *given, hcp_link_read *read) {
  PyObject *owners, *done;
  if (!PyArg_ParseTuple(given, "OO:read", &owners, &done)) return -1;
  if (ranks_from(owners, "owners", &read->owners, &read->owner_count) < 0) return -1;
  return ranks_from(done, "done", &read->done, &read->done_count);
}

/* Fills zeroed reads, in part where one of them is refused. */
static int reads_from(PyObject *given, hcp_link_read *reads, Py_ssize_t n) {
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject *item = PySequence_GetItem(given, i);
    int status = item == NULL ? -1 : read_from(item, &reads[i]);
    Py_XDECREF(item);
    if (status < 0) return -1;
  }
  return 0;
}

static PyObject *exchange_of(PyObject *self, int64_t half, PyObject *readers,
                             const hcp_link_read *reads, Py_ssize_t n) {
  const int64_t *ranks;
  int64_t count;
  hcp_table *table;
  hcp_error err;
  if (ranks_from(readers, "readers", &ranks, &count) < 0) return NULL;
  hcp_status status = hcp_link_exchange(link_of(self), half, ranks, count, reads, n, &table, &err);
  PyMem_Free((void *)(uintptr_t)ranks);
  if (status != HCP_OK) return hcp_py_raise(&err);
  return hcp_py_table(PyType_GetModule(Py_TYPE(self)), table);
}

static PyObject *link_exchange(PyObject *self, PyObject *args) {
  PyObject *given[3], *words = NULL;
  int64_t half;
  if (!PyArg_ParseTuple(args, "OOO:exchange", &given[0], &given[1], &given[2]) ||
      hcp_py_int64(given[0], "half", &half) < 0)
    return NULL;
  Py_ssize_t n = PySequence_Size(given[2]);
  if (n < 0) return NULL;
  hcp_link_read *reads = PyMem_Calloc((size_t)n + 1, sizeof *reads);
  if (reads == NULL) return PyErr_NoMemory();
  if (reads_from(given[2], reads, n) == 0) words = exchange_of(self, half, given[1], reads, n);
  for (Py_ssize_t i = 0; i < n; i++) free_read(&reads[i]);
  PyMem_Free(reads);
  return words;
}

static PyObject *link_rounds(PyObject *self, PyObject *args) {
  PyObject *given[3], *words = NULL;
  int64_t row_bytes;
  hcp_moves sends = {NULL, 0}, receives = {NULL, 0};
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "OOO:rounds", &given[0], &given[1], &given[2]) ||
      hcp_py_int64(given[2], "row_bytes", &row_bytes) < 0)
    return NULL;
  if (ranks_from(given[0], "sends", &sends.moves, &sends.count) == 0 &&
      ranks_from(given[1], "receives", &receives.moves, &receives.count) == 0) {
    sends.count /= 3;
    receives.count /= 3;
    words = hcp_link_rounds(link_of(self), &sends, &receives, row_bytes, &table, &err) == HCP_OK
                ? hcp_py_table(PyType_GetModule(Py_TYPE(self)), table)
                : hcp_py_raise(&err);
  }
  PyMem_Free((void *)(uintptr_t)sends.moves);
  PyMem_Free((void *)(uintptr_t)receives.moves);
  return words;
}

static PyObject *link_words(PyObject *self, void *unused) {
  (void)unused;
  hcp_link *link = ((link_object *)self)->link;
  return hcp_py_view(PyType_GetModule(Py_TYPE(self)), self, link,
                     (Py_ssize_t)hcp_link_words(link->ranks), 1, 'q', 1);
}

static PyGetSetDef link_getset[] = {
    {"counts", link_counts, NULL, "Number of counts, which lie on the device.", NULL},
    {"mailbox_bytes", link_mailbox_bytes, NULL, "Bytes for one round of a message.", NULL},
    {"half_bytes", link_half_bytes, NULL, "Bytes for the rows of one exchange.", NULL},
    {"words", link_words, NULL, "The link itself, for operators.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMethodDef link_methods[] = {
    {"rows", link_rows, METH_VARARGS,
     "rows($self, half, rows, row_bytes, /)\n--\n\n"
     "The byte at which rows of a half begin. ValueError where they do not fit."},
    {"exchange", link_exchange, METH_VARARGS,
     "exchange($self, half, readers, reads, /)\n--\n\n"
     "Signals of an exchange of this rank, as words of a table. Each of reads is (owners, done)."},
    {"rounds", link_rounds, METH_VARARGS,
     "rounds($self, sends, receives, row_bytes, /)\n--\n\n"
     "Messages of (peer, row, rows) through mailboxes, as words of a table."},
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

static PyObject *link_buffer_bytes(PyObject *module, PyObject *staged) {
  int64_t value;
  (void)module;
  if (hcp_py_int64(staged, "staged", &value) < 0) return NULL;
  return PyLong_FromLongLong(hcp_link_buffer_bytes(value));
}

static PyMethodDef functions[] = {
    {"link_buffer_bytes", link_buffer_bytes, METH_O,
     "The least buffer_bytes with which an exchange may stage so many bytes."},
    {"signal_tag", signal_tag, METH_O, "The tag of a signal's word."},
    {"link_bytes", link_bytes, METH_VARARGS,
     "The memory that each of so many ranks needs, for words and for rows."},
    {NULL, NULL, 0, NULL}};

int hcp_py_add_link(PyObject *module) {
#define NUMBER(name, value) {#name, value},
#define FIELD(type, name) #name,
  static const number numbers[] = {HCP_SIGNAL_NUMBERS(NUMBER){NULL, 0}};
  static const char *const failure[] = {HCP_SIGNAL_FAILURE(FIELD)};
  static const char *const watch[] = {HCP_WATCH(FIELD)};
#undef NUMBER
#undef FIELD
  if (hcp_py_add_type(module, "Link", &link_spec) < 0 ||
      hcp_py_add_owned(module, "SIGNALS", dict_of(numbers)) < 0 ||
      hcp_py_add_names(module, "SIGNAL_FAILURE", failure, sizeof failure / sizeof *failure) < 0 ||
      hcp_py_add_names(module, "WATCH", watch, sizeof watch / sizeof *watch) < 0)
    return -1;
  return PyModule_AddFunctions(module, functions);
}
