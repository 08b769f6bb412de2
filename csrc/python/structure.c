/* structure.c - Structure: tests whether objects still hold the values of the last walk.
 *
 * A walk over a model's objects is slow and this is fast: two pointers are
 * compared for each place, its name's and its value's. Values of atomic types
 * (numbers, text, tensors) may change, except those under a watched name. */
#include "glue.h"

/* One place as it was taken. */
typedef struct structure_place {
  PyObject *key; /* NULL in a list, and for what is no plain text */
  PyObject *held; /* NULL for any atom */
} structure_place;

typedef struct structure_object {
  PyObject_HEAD PyObject *holders; /* a tuple of dictionaries and lists */
  PyObject *atoms; /* a tuple of types */
  structure_place *places;
  Py_ssize_t *sizes; /* of each holder */
  Py_ssize_t count; /* of places */
} structure_object;

static int is_atom(PyObject *atoms, Py_ssize_t n, PyObject *value) {
  PyObject *type = (PyObject *)Py_TYPE(value);
  for (Py_ssize_t i = 0; i < n; i++)
    if (PyTuple_GetItem(atoms, i) == type) return 1;
  return 0;
}

static Py_ssize_t size_of(PyObject *holder) {
  return PyDict_Check(holder) ? PyDict_Size(holder) : PyList_Size(holder);
}

/* The next place of a holder; key is NULL in a list. */
static int next_place(PyObject *holder, Py_ssize_t *position, PyObject **key, PyObject **value) {
  *key = NULL;
  if (PyDict_Check(holder)) return PyDict_Next(holder, position, key, value);
  if (*position >= PyList_Size(holder)) return 0;
  *value = PyList_GetItem(holder, (*position)++);
  return 1;
}

/* ---- comparing ---- */

/* An equal integer or text is the same to whoever reads it. Plain ones alone:
 * comparing them runs no code. */
static int is_same(PyObject *held, PyObject *now) {
  if (held == now) return 1;
  if (!(PyLong_CheckExact(held) && PyLong_CheckExact(now)) &&
      !(PyUnicode_CheckExact(held) && PyUnicode_CheckExact(now)))
    return 0;
  return PyObject_RichCompareBool(held, now, Py_EQ) == 1;
}

static PyObject *plain_text(PyObject *key) {
  return key != NULL && PyUnicode_CheckExact(key) ? key : NULL;
}

static int is_same_name(PyObject *key, PyObject *now) {
  PyObject *name = plain_text(now);
  return key == name || (key != NULL && name != NULL && is_same(key, name));
}

static int holder_holds(const structure_object *self, Py_ssize_t h, Py_ssize_t *at) {
  PyObject *holder = PyTuple_GetItem(self->holders, h);
  PyObject *key, *value;
  Py_ssize_t position = 0;
  Py_ssize_t atom_types = PyTuple_Size(self->atoms);
  if (size_of(holder) != self->sizes[h]) return 0;
  while (next_place(holder, &position, &key, &value)) {
    const structure_place *place = &self->places[(*at)++];
    if (!is_same_name(place->key, key)) return 0;
    if (place->held == NULL ? !is_atom(self->atoms, atom_types, value)
                            : !is_same(place->held, value))
      return 0;
  }
  return 1;
}

static PyObject *structure_holds(PyObject *object, PyObject *unused) {
  const structure_object *self = (structure_object *)object;
  Py_ssize_t n = self->holders == NULL ? 0 : PyTuple_Size(self->holders);
  Py_ssize_t at = 0;
  (void)unused;
  for (Py_ssize_t h = 0; h < n; h++)
    if (!holder_holds(self, h, &at)) Py_RETURN_FALSE;
  Py_RETURN_TRUE;
}

/* ---- taking ---- */

static int take_sizes(structure_object *self) {
  Py_ssize_t n = PyTuple_Size(self->holders);
  Py_ssize_t total = 0;
  self->sizes = PyMem_Calloc((size_t)n + 1, sizeof *self->sizes);
  if (self->sizes == NULL) goto no_memory;
  for (Py_ssize_t h = 0; h < n; h++) {
    PyObject *holder = PyTuple_GetItem(self->holders, h);
    if (!PyDict_Check(holder) && !PyList_Check(holder)) {
      PyErr_Format(PyExc_TypeError, "holders[%zd] is %R, expected a dictionary or a list", h,
                   (PyObject *)Py_TYPE(holder));
      return -1;
    }
    self->sizes[h] = size_of(holder);
    total += self->sizes[h];
  }
  self->places = PyMem_Calloc((size_t)total + 1, sizeof *self->places);
  if (self->places != NULL) return 0;
no_memory:
  PyErr_NoMemory();
  return -1;
}

/* Plain text alone, on both sides: looking it up runs no code, which could
 * change the holders while they are gone through. */
static int check_watched(PyObject *watched) {
  PyObject *name = NULL;
  if (!PyFrozenSet_CheckExact(watched)) {
    PyErr_Format(PyExc_TypeError, "watched is %R, expected a frozenset of str", watched);
    return -1;
  }
  PyObject *names = PyObject_GetIter(watched);
  if (names == NULL) return -1;
  while ((name = PyIter_Next(names)) != NULL && PyUnicode_CheckExact(name)) Py_DECREF(name);
  if (name != NULL)
    PyErr_Format(PyExc_TypeError, "watched has %R of %R, expected str", name,
                 (PyObject *)Py_TYPE(name));
  Py_XDECREF(name);
  Py_DECREF(names);
  return PyErr_Occurred() ? -1 : 0;
}

/* 1, 0, or -1 with an exception set. */
static int is_watched(PyObject *watched, PyObject *key) {
  return plain_text(key) != NULL ? PySet_Contains(watched, key) : 0;
}

static int take_holder(structure_object *self, PyObject *holder, PyObject *watched) {
  PyObject *key, *value;
  Py_ssize_t position = 0;
  Py_ssize_t atom_types = PyTuple_Size(self->atoms);
  while (next_place(holder, &position, &key, &value)) {
    int keep = is_atom(self->atoms, atom_types, value) ? is_watched(watched, key) : 1;
    if (keep < 0) return -1;
    structure_place *place = &self->places[self->count++];
    place->key = Py_XNewRef(plain_text(key));
    place->held = keep ? Py_NewRef(value) : NULL;
  }
  return 0;
}

static PyObject *structure_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  PyObject *holders, *watched, *atoms;
  static char *keywords[] = {"", "", "", NULL};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO:Structure", keywords, &holders, &watched,
                                   &atoms))
    return NULL;
  if (check_watched(watched) < 0) return NULL;
  structure_object *self = (structure_object *)PyType_GenericAlloc(type, 0);
  if (self == NULL) return NULL;
  self->holders = PySequence_Tuple(holders);
  self->atoms = self->holders == NULL ? NULL : PySequence_Tuple(atoms);
  if (self->atoms == NULL || take_sizes(self) < 0) goto fail;
  for (Py_ssize_t h = 0; h < PyTuple_Size(self->holders); h++)
    if (take_holder(self, PyTuple_GetItem(self->holders, h), watched) < 0) goto fail;
  return (PyObject *)self;
fail:
  Py_DECREF(self);
  return NULL;
}

/* ---- the type ---- */

static int structure_traverse(PyObject *object, visitproc visit, void *arg) {
  structure_object *self = (structure_object *)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->holders);
  Py_VISIT(self->atoms);
  for (Py_ssize_t i = 0; i < self->count; i++) Py_VISIT(self->places[i].held);
  return 0;
}

static int structure_clear(PyObject *object) {
  structure_object *self = (structure_object *)object;
  structure_place *places = self->places;
  Py_ssize_t count = self->count;
  self->places = NULL;
  self->count = 0;
  Py_CLEAR(self->holders);
  Py_CLEAR(self->atoms);
  for (Py_ssize_t i = 0; i < count; i++) {
    Py_XDECREF(places[i].key);
    Py_XDECREF(places[i].held);
  }
  PyMem_Free(places);
  PyMem_Free(self->sizes);
  self->sizes = NULL;
  return 0;
}

static void structure_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  structure_clear(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

static PyMethodDef structure_methods[] = {
    {"holds", structure_holds, METH_NOARGS,
     "holds($self, /)\n--\n\nWhether every place holds what it held."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot structure_slots[] = {
    {Py_tp_new, HCP_PY_SLOT(structure_new)},
    {Py_tp_dealloc, HCP_PY_SLOT(structure_dealloc)},
    {Py_tp_traverse, HCP_PY_SLOT(structure_traverse)},
    {Py_tp_clear, HCP_PY_SLOT(structure_clear)},
    {Py_tp_methods, structure_methods},
    {Py_tp_doc,
     "Structure(holders, watched, atoms, /)\n--\n\n"
     "What dictionaries and lists hold just now, object by object, and the names in dictionaries\n"
     "that are text. Values whose type is one of atoms do not count, unless their key is in\n"
     "watched, a frozenset of str."},
    {0, NULL}};

static PyType_Spec structure_spec = {
    "hcp._core.Structure", sizeof(structure_object), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC, structure_slots};

int hcp_py_add_structure(PyObject *module) {
  return hcp_py_add_type(module, "Structure", &structure_spec);
}
