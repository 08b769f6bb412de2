/* slots.c - SlotTable: places of Python objects and their new values, parsed once. */
#include "slots.h"

/* ---- one slot ---- */

int hcp_py_slot_is_exact(const hcp_py_slot *at) {
  return at->kind != HCP_PY_SLOT_ATTRIBUTE && at->kind != HCP_PY_SLOT_MEMBER &&
         PyDict_CheckExact(at->owner);
}

static int may_be_absent(const hcp_py_slot *at) {
  return at->kind == HCP_PY_SLOT_ENTRY || at->kind == HCP_PY_SLOT_ABSENT;
}

static int read_item(const hcp_py_slot *at, PyObject **value) {
  if (!PyDict_CheckExact(at->owner)) {
    *value = PyObject_GetItem(at->owner, at->key);
    if (*value != NULL) return 0;
    if (!may_be_absent(at) || !PyErr_ExceptionMatches(PyExc_KeyError)) return -1;
    PyErr_Clear();
    return 0;
  }
  *value = Py_XNewRef(PyDict_GetItemWithError(at->owner, at->key));
  if (*value != NULL) return 0;
  if (!PyErr_Occurred() && may_be_absent(at)) return 0;
  if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, at->key);
  return -1;
}

int hcp_py_slot_read(const hcp_py_slot *at, PyObject **value) {
  switch (at->kind) {
    case HCP_PY_SLOT_ITEM:
    case HCP_PY_SLOT_ENTRY:
    case HCP_PY_SLOT_ABSENT:
    case HCP_PY_SLOT_DEPTH:
      return read_item(at, value);
    case HCP_PY_SLOT_ATTRIBUTE:
      *value = PyObject_GetAttr(at->owner, at->key);
      break;
    case HCP_PY_SLOT_MEMBER:
    case HCP_PY_SLOT_KIND_COUNT:
      *value = PyObject_GenericGetAttr(at->owner, at->key);
      break;
  }
  return *value == NULL ? -1 : 0;
}

static int delete_entry(const hcp_py_slot *at) {
  if (PyObject_DelItem(at->owner, at->key) == 0) return 0;
  if (!PyErr_ExceptionMatches(PyExc_KeyError)) return -1;
  PyErr_Clear();
  return 0;
}

int hcp_py_slot_write(const hcp_py_slot *at, PyObject *value) {
  switch (at->kind) {
    case HCP_PY_SLOT_ITEM:
    case HCP_PY_SLOT_ENTRY:
    case HCP_PY_SLOT_ABSENT:
    case HCP_PY_SLOT_DEPTH:
      if (value == NULL) return delete_entry(at);
      if (PyDict_CheckExact(at->owner)) return PyDict_SetItem(at->owner, at->key, value);
      return PyObject_SetItem(at->owner, at->key, value);
    case HCP_PY_SLOT_ATTRIBUTE:
      return PyObject_SetAttr(at->owner, at->key, value);
    case HCP_PY_SLOT_MEMBER:
    case HCP_PY_SLOT_KIND_COUNT:
      break;
  }
  return PyObject_GenericSetAttr(at->owner, at->key, value);
}

/* ---- parsing ---- */

static int parse_kind(PyObject *kind, hcp_py_slot_kind *out) {
  static const char *const names[] = {
#define KIND_NAME(name, text) text,
      HCP_PY_SLOT_KINDS(KIND_NAME)
#undef KIND_NAME
  };
  for (int k = 0; k < HCP_PY_SLOT_KIND_COUNT; k++)
    if (PyUnicode_Check(kind) && PyUnicode_CompareWithASCIIString(kind, names[k]) == 0) {
      *out = (hcp_py_slot_kind)k;
      return 0;
    }
  return -1;
}

static int parse_slot(PyObject *item, Py_ssize_t i, hcp_py_slot *out) {
  hcp_py_slot made;
  if (!PyTuple_Check(item) || PyTuple_Size(item) != 4) {
    PyErr_Format(PyExc_TypeError, "slots[%zd] is %R, expected a tuple (kind, owner, key, path)", i,
                 item);
    return -1;
  }
  if (parse_kind(PyTuple_GetItem(item, 0), &made.kind) < 0) {
    PyErr_Format(PyExc_ValueError, "slots[%zd] is of kind %R, expected one of %s", i,
                 PyTuple_GetItem(item, 0), &(HCP_PY_SLOT_KINDS(HCP_PY_LISTED))[2]);
    return -1;
  }
  made.owner = Py_NewRef(PyTuple_GetItem(item, 1));
  made.key = Py_NewRef(PyTuple_GetItem(item, 2));
  made.path = Py_NewRef(PyTuple_GetItem(item, 3));
  *out = made;
  return 0;
}

/* Both are tuples. */
static int fill_table(hcp_py_slot_table *table, PyObject *slots, PyObject *values) {
  Py_ssize_t n = PyTuple_Size(slots);
  if (PyTuple_Size(values) != n || n > INT32_MAX) {
    PyErr_Format(PyExc_ValueError, "there are %zd slots and %zd values, expected as many", n,
                 PyTuple_Size(values));
    return -1;
  }
  table->slots = PyMem_Calloc((size_t)n + 1, sizeof *table->slots);
  table->values = PyMem_Calloc((size_t)n + 1, sizeof(PyObject *));
  if (table->slots == NULL || table->values == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t i = 0; i < n; i++) {
    if (parse_slot(PyTuple_GetItem(slots, i), i, &table->slots[i]) < 0) return -1;
    table->values[i] = Py_NewRef(PyTuple_GetItem(values, i));
    table->n++;
  }
  return 0;
}

static PyObject *make_table(PyTypeObject *type, PyObject *slot_items, PyObject *value_items) {
  PyObject *self = NULL;
  PyObject *slots = PySequence_Tuple(slot_items);
  PyObject *values = slots == NULL ? NULL : PySequence_Tuple(value_items);
  if (values == NULL) goto release_tuples;
  self = PyType_GenericAlloc(type, 0);
  if (self != NULL && fill_table((hcp_py_slot_table *)self, slots, values) < 0) Py_CLEAR(self);
release_tuples:
  Py_XDECREF(slots);
  Py_XDECREF(values);
  return self;
}

PyObject *hcp_py_slot_table_new(PyObject *slots, PyObject *values) {
  PyObject *table = NULL;
  PyObject *module = PyImport_ImportModule("hcp._core");
  PyObject *type = module == NULL ? NULL : PyObject_GetAttrString(module, "SlotTable");
  if (type != NULL) table = make_table((PyTypeObject *)type, slots, values);
  Py_XDECREF(type);
  Py_XDECREF(module);
  return table;
}

/* ---- the type ---- */

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  PyObject *slots, *values;
  static char *keywords[] = {"", "", NULL};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:SlotTable", keywords, &slots, &values))
    return NULL;
  return make_table(type, slots, values);
}

static int table_traverse(PyObject *object, visitproc visit, void *arg) {
  hcp_py_slot_table *self = (hcp_py_slot_table *)object;
  Py_VISIT(Py_TYPE(object));
  for (Py_ssize_t i = 0; i < self->n; i++) {
    Py_VISIT(self->slots[i].owner);
    Py_VISIT(self->slots[i].key);
    Py_VISIT(self->slots[i].path);
    Py_VISIT(self->values[i]);
  }
  return 0;
}

/* Detached from the object before anything is released: releasing runs code. */
static int table_clear(PyObject *object) {
  hcp_py_slot_table *self = (hcp_py_slot_table *)object;
  hcp_py_slot *slots = self->slots;
  PyObject **values = self->values;
  Py_ssize_t n = self->n;
  self->slots = NULL;
  self->values = NULL;
  self->n = 0;
  for (Py_ssize_t i = 0; i < n; i++) {
    Py_DECREF(slots[i].owner);
    Py_DECREF(slots[i].key);
    Py_DECREF(slots[i].path);
    Py_DECREF(values[i]);
  }
  PyMem_Free(slots);
  PyMem_Free(values);
  return 0;
}

static void table_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  table_clear(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

static Py_ssize_t table_length(PyObject *self) { return ((hcp_py_slot_table *)self)->n; }

static PyType_Slot table_slots[] = {
    {Py_tp_new, HCP_PY_SLOT(table_new)},
    {Py_tp_dealloc, HCP_PY_SLOT(table_dealloc)},
    {Py_tp_traverse, HCP_PY_SLOT(table_traverse)},
    {Py_tp_clear, HCP_PY_SLOT(table_clear)},
    {Py_sq_length, HCP_PY_SLOT(table_length)},
    {Py_tp_doc,
     "SlotTable(slots, values, /)\n--\n\n"
     "Slots and the value that each is to hold, for Rebinding.switch: made once, used for every\n"
     "switch. Immutable. len() is the number of slots."},
    {0, NULL}};

static PyType_Spec table_spec = {"hcp._core.SlotTable", sizeof(hcp_py_slot_table), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC,
                                 table_slots};

hcp_py_slot_table *hcp_py_slot_table_of(PyObject *object) {
  /* The type has no subclasses, and nothing else is deallocated by this. */
  void *dealloc = PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc);
  return dealloc == HCP_PY_SLOT(table_dealloc) ? (hcp_py_slot_table *)object : NULL;
}

int hcp_py_add_slots(PyObject *module) { return hcp_py_add_type(module, "SlotTable", &table_spec); }
