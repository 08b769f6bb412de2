/* rebinding.c - Rebinding: the core's undo log over slots of Python objects. */
#include <string.h>

#include "glue.h"

/* How a slot is read and written.
 *
 *   item       owner[key]: dictionaries (an object's __dict__ too), lists
 *   attribute  getattr and setattr, with all that a class makes of them
 *   member     as object does it: past __setattr__, for __slots__ and frozen classes */
#define SLOT_KINDS(X)       \
  X(ITEM, "item")           \
  X(ATTRIBUTE, "attribute") \
  X(MEMBER, "member")

typedef enum slot_kind {
#define KIND_ENUM(name, text) SLOT_##name,
  SLOT_KINDS(KIND_ENUM)
#undef KIND_ENUM
      SLOT_KIND_COUNT
} slot_kind;

typedef struct slot {
  slot_kind kind;
  PyObject *owner, *key, *path;
} slot;

/* While busy, a callback runs Python code that may come back here. */
typedef struct rebinding_object {
  PyObject_HEAD hcp_rebinding *rebinding;
  slot *slots;
  Py_ssize_t slot_count;
  PyObject *error; /* the first exception of a callback */
  int busy;
} rebinding_object;

/* ---- exceptions of callbacks ---- */

/* Deprecated since 3.12 in favour of a call that the stable ABI of 3.11 lacks. */
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#endif
/* The exception that is set, and no more is; NULL when none was. */
static PyObject *take_exception(void) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != NULL) PyException_SetTraceback(value, trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return value;
}
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

/* Takes the reference. NULL raises nothing. */
static void raise_exception(PyObject *value) {
  if (value == NULL) return;
  PyErr_SetObject((PyObject *)Py_TYPE(value), value);
  Py_DECREF(value);
}

/* A note that cannot be added must not hide the exception it is about. */
static void add_note(PyObject *exception, const char *doing, const slot *at, PyObject *cause) {
  PyObject *note = cause == NULL
                       ? PyUnicode_FromFormat("hcp: while %s %S", doing, at->path)
                       : PyUnicode_FromFormat("hcp: then, while %s %S: %R", doing, at->path, cause);
  PyObject *done = note == NULL ? NULL : PyObject_CallMethod(exception, "add_note", "O", note);
  if (done == NULL) PyErr_Clear();
  Py_XDECREF(done);
  Py_XDECREF(note);
}

/* Keeps the exception that is set: the first one whole, others as its notes. */
static int32_t keep_exception(rebinding_object *self, const char *doing, const slot *at) {
  PyObject *exception = take_exception();
  if (self->error == NULL) {
    add_note(exception, doing, at, NULL);
    self->error = exception;
    return -1;
  }
  add_note(self->error, doing, at, exception);
  Py_DECREF(exception);
  return -1;
}

/* ---- one slot ---- */

static PyObject *read_item(const slot *at) {
  if (!PyDict_CheckExact(at->owner)) return PyObject_GetItem(at->owner, at->key);
  PyObject *value = PyDict_GetItemWithError(at->owner, at->key);
  if (value == NULL && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, at->key);
  return Py_XNewRef(value);
}

static PyObject *read_slot(const slot *at) {
  switch (at->kind) {
    case SLOT_ITEM:
      return read_item(at);
    case SLOT_ATTRIBUTE:
      return PyObject_GetAttr(at->owner, at->key);
    case SLOT_MEMBER:
    case SLOT_KIND_COUNT:
      break;
  }
  return PyObject_GenericGetAttr(at->owner, at->key);
}

static int write_slot(const slot *at, PyObject *value) {
  switch (at->kind) {
    case SLOT_ITEM:
      if (PyDict_CheckExact(at->owner)) return PyDict_SetItem(at->owner, at->key, value);
      return PyObject_SetItem(at->owner, at->key, value);
    case SLOT_ATTRIBUTE:
      return PyObject_SetAttr(at->owner, at->key, value);
    case SLOT_MEMBER:
    case SLOT_KIND_COUNT:
      break;
  }
  return PyObject_GenericSetAttr(at->owner, at->key, value);
}

/* A setter written in Python may have stored the value before it raised, and
 * Ctrl-C may arrive right behind the store: put old back where that shows. */
static void take_back(rebinding_object *self, const slot *at, PyObject *value, PyObject *old) {
  PyObject *now = read_slot(at);
  if (now == NULL)
    PyErr_Clear();
  else if (now == value && now != old && write_slot(at, old) < 0)
    keep_exception(self, "undoing", at);
  Py_XDECREF(now);
}

/* ---- the core's callbacks ---- */

static int32_t get_callback(void *context, int32_t i, void **value) {
  rebinding_object *self = context;
  *value = read_slot(&self->slots[i]);
  return *value != NULL ? 0 : keep_exception(self, "reading", &self->slots[i]);
}

static int32_t set_callback(void *context, int32_t i, void *value) {
  rebinding_object *self = context;
  const slot *at = &self->slots[i];
  int undoing = self->error != NULL || self->rebinding != NULL;
  int exact = at->kind == SLOT_ITEM && PyDict_CheckExact(at->owner);
  PyObject *old = undoing || exact ? NULL : read_slot(at);
  if (old == NULL && PyErr_Occurred()) PyErr_Clear();
  int status = write_slot(at, value);
  if (status < 0) keep_exception(self, undoing ? "undoing" : "rebinding", at);
  if (status < 0 && old != NULL) take_back(self, at, value, old);
  Py_XDECREF(old);
  return status;
}

static void release_callback(void *context, void *value) {
  (void)context;
  Py_XDECREF((PyObject *)value);
}

/* ---- the table ---- */

static int parse_kind(PyObject *kind, slot_kind *out) {
  static const char *const names[] = {
#define KIND_NAME(name, text) text,
      SLOT_KINDS(KIND_NAME)
#undef KIND_NAME
  };
  for (int k = 0; k < SLOT_KIND_COUNT; k++)
    if (PyUnicode_Check(kind) && PyUnicode_CompareWithASCIIString(kind, names[k]) == 0) {
      *out = (slot_kind)k;
      return 0;
    }
  return -1;
}

static int parse_slot(PyObject *item, Py_ssize_t i, slot *out) {
  slot made;
  if (!PyTuple_Check(item) || PyTuple_Size(item) != 4) {
    PyErr_Format(PyExc_TypeError, "slots[%zd] is %R, expected a tuple (kind, owner, key, path)", i,
                 item);
    return -1;
  }
  if (parse_kind(PyTuple_GetItem(item, 0), &made.kind) < 0) {
    PyErr_Format(PyExc_ValueError,
                 "slots[%zd] is of kind %R, expected 'item', 'attribute' or 'member'", i,
                 PyTuple_GetItem(item, 0));
    return -1;
  }
  made.owner = Py_NewRef(PyTuple_GetItem(item, 1));
  made.key = Py_NewRef(PyTuple_GetItem(item, 2));
  made.path = Py_NewRef(PyTuple_GetItem(item, 3));
  *out = made;
  return 0;
}

/* Detached from the object before anything is released: releasing runs code. */
static void drop_slots(rebinding_object *self) {
  slot *slots = self->slots;
  Py_ssize_t n = self->slot_count;
  self->slots = NULL;
  self->slot_count = 0;
  for (Py_ssize_t i = 0; i < n; i++) {
    Py_DECREF(slots[i].owner);
    Py_DECREF(slots[i].key);
    Py_DECREF(slots[i].path);
  }
  PyMem_Free(slots);
}

static int take_slots(rebinding_object *self, PyObject *items) {
  Py_ssize_t n = PyTuple_Size(items);
  self->slots = PyMem_Calloc((size_t)n + 1, sizeof *self->slots);
  if (self->slots == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t i = 0; i < n; i++) {
    if (parse_slot(PyTuple_GetItem(items, i), i, &self->slots[i]) < 0) goto fail_slot;
    self->slot_count++;
  }
  return 0;

fail_slot:
  drop_slots(self);
  return -1;
}

/* ---- switch and restore ---- */

/* Raises what the callbacks kept, or else what the core says. */
static void raise_kept(rebinding_object *self, const hcp_error *err) {
  PyObject *error = self->error;
  self->error = NULL;
  if (error != NULL)
    raise_exception(error);
  else
    hcp_py_raise(err);
}

static int restore(rebinding_object *self) {
  hcp_error err;
  if (self->rebinding == NULL || self->busy) return 0;
  self->busy = 1;
  hcp_status status = hcp_rebinding_restore(self->rebinding, &err);
  self->busy = 0;
  hcp_rebinding_destroy(self->rebinding);
  self->rebinding = NULL;
  drop_slots(self);
  if (status == HCP_OK) return 0;
  raise_kept(self, &err);
  return -1;
}

/* values by slot, borrowed from the tuple. */
static void **pointers_of(PyObject *values) {
  Py_ssize_t n = PyTuple_Size(values);
  void **pointers = PyMem_Calloc((size_t)n + 1, sizeof *pointers);
  if (pointers == NULL) PyErr_NoMemory();
  for (Py_ssize_t i = 0; pointers != NULL && i < n; i++) pointers[i] = PyTuple_GetItem(values, i);
  return pointers;
}

static int switch_slots(rebinding_object *self, PyObject *slots, PyObject *values) {
  const hcp_slots callbacks = {get_callback, set_callback, release_callback, self};
  hcp_error err;
  void **pointers = pointers_of(values);
  if (pointers == NULL) return -1;
  int result = take_slots(self, slots);
  if (result < 0) goto free_pointers;
  self->busy = 1;
  hcp_status status =
      hcp_rebinding_create(&callbacks, pointers, (int32_t)self->slot_count, &self->rebinding, &err);
  self->busy = 0;
  if (status != HCP_OK) {
    drop_slots(self);
    raise_kept(self, &err);
    result = -1;
  }
free_pointers:
  PyMem_Free(pointers);
  return result;
}

static int check_switch(const rebinding_object *self, PyObject *slots, PyObject *values) {
  if (self->busy || self->rebinding != NULL) {
    PyErr_Format(PyExc_RuntimeError, "this rebinding holds %d slots already, restore() comes first",
                 (int)hcp_rebinding_pending(self->rebinding));
    return -1;
  }
  if (PyTuple_Size(slots) == PyTuple_Size(values) && PyTuple_Size(slots) <= INT32_MAX) return 0;
  PyErr_Format(PyExc_ValueError, "there are %zd slots and %zd values, expected as many",
               PyTuple_Size(slots), PyTuple_Size(values));
  return -1;
}

static PyObject *rebinding_switch(PyObject *self, PyObject *args) {
  PyObject *slots_argument, *values_argument;
  int status = -1;
  if (!PyArg_ParseTuple(args, "OO:switch", &slots_argument, &values_argument)) return NULL;
  PyObject *slots = PySequence_Tuple(slots_argument);
  PyObject *values = slots == NULL ? NULL : PySequence_Tuple(values_argument);
  if (values != NULL) status = check_switch((rebinding_object *)self, slots, values);
  if (status == 0) status = switch_slots((rebinding_object *)self, slots, values);
  Py_XDECREF(slots);
  Py_XDECREF(values);
  return status < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *rebinding_restore(PyObject *self, PyObject *unused) {
  (void)unused;
  return restore((rebinding_object *)self) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *rebinding_enter(PyObject *self, PyObject *unused) {
  (void)unused;
  return Py_NewRef(self);
}

/* In C so that Ctrl-C cannot arrive between leaving the body and restoring. */
static PyObject *rebinding_exit(PyObject *self, PyObject *exception) {
  (void)exception;
  return restore((rebinding_object *)self) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *get_pending(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromLong(hcp_rebinding_pending(((rebinding_object *)self)->rebinding));
}

/* ---- the type ---- */

static int rebinding_init(PyObject *self, PyObject *args, PyObject *kwargs) {
  if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
    PyErr_SetString(PyExc_TypeError, "Rebinding() takes no keyword arguments");
    return -1;
  }
  if (PyTuple_Size(args) == 0) return 0;
  PyObject *done = rebinding_switch(self, args);
  Py_XDECREF(done);
  return done == NULL ? -1 : 0;
}

static int rebinding_traverse(PyObject *object, visitproc visit, void *arg) {
  rebinding_object *self = (rebinding_object *)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->error);
  for (Py_ssize_t i = 0; i < self->slot_count; i++) {
    Py_VISIT(self->slots[i].owner);
    Py_VISIT(self->slots[i].key);
    Py_VISIT(self->slots[i].path);
  }
  for (int32_t i = 0; i < hcp_rebinding_pending(self->rebinding); i++)
    Py_VISIT((PyObject *)hcp_rebinding_held(self->rebinding, i));
  return 0;
}

/* Reached only after the finalizer has restored. */
static int rebinding_clear(PyObject *object) {
  rebinding_object *self = (rebinding_object *)object;
  hcp_rebinding *rebinding = self->rebinding;
  self->rebinding = NULL;
  hcp_rebinding_destroy(rebinding);
  drop_slots(self);
  Py_CLEAR(self->error);
  return 0;
}

/* A switch that nobody holds any more is undone: Ctrl-C may arrive between the
 * switch and the statement that was to keep it. */
static void rebinding_finalize(PyObject *self) {
  PyObject *raised = take_exception();
  if (restore((rebinding_object *)self) < 0) PyErr_WriteUnraisable(self);
  raise_exception(raised);
}

static void rebinding_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  rebinding_finalize(self);
  rebinding_clear(self);
  freefunc release = (freefunc)(uintptr_t)PyType_GetSlot(type, Py_tp_free);
  release(self);
  Py_DECREF(type);
}

static PyMethodDef rebinding_methods[] = {
    {"switch", rebinding_switch, METH_VARARGS,
     "switch($self, slots, values, /)\n--\n\n"
     "Put values[i] in slots[i], all or none. A slot is (kind, owner, key, path)."},
    {"restore", rebinding_restore, METH_NOARGS,
     "restore($self, /)\n--\n\nGive every slot what it held, last first. Twice does nothing."},
    {"__enter__", rebinding_enter, METH_NOARGS, "__enter__($self, /)\n--\n\nThe rebinding."},
    {"__exit__", rebinding_exit, METH_VARARGS, "__exit__($self, /, *exception)\n--\n\nRestores."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef rebinding_getset[] = {
    {"pending", get_pending, NULL, "Slots still to be restored.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot rebinding_slots[] = {
    {Py_tp_new, HCP_PY_SLOT(PyType_GenericNew)},
    {Py_tp_init, HCP_PY_SLOT(rebinding_init)},
    {Py_tp_dealloc, HCP_PY_SLOT(rebinding_dealloc)},
    {Py_tp_finalize, HCP_PY_SLOT(rebinding_finalize)},
    {Py_tp_traverse, HCP_PY_SLOT(rebinding_traverse)},
    {Py_tp_clear, HCP_PY_SLOT(rebinding_clear)},
    {Py_tp_methods, rebinding_methods},
    {Py_tp_getset, rebinding_getset},
    {Py_tp_doc,
     "Rebinding(slots=(), values=(), /)\n--\n\n"
     "A switch of slots, all or none, and what each held before. A slot is a tuple\n"
     "(kind, owner, key, path): kind 'item' is owner[key], 'attribute' getattr and\n"
     "setattr, 'member' the same past a class's own __setattr__; path names it in\n"
     "errors. Restores on leaving a with block, and when it is dropped."},
    {0, NULL}};

static PyType_Spec rebinding_spec = {"hcp._core.Rebinding", sizeof(rebinding_object), 0,
                                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                                     rebinding_slots};

int hcp_py_add_rebinding(PyObject *module) {
  return hcp_py_add_type(module, "Rebinding", &rebinding_spec);
}
