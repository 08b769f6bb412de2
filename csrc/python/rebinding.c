/* rebinding.c - Rebinding: the core's undo log over slots of Python objects. */
#include "slots.h"

/* While busy, a callback runs Python code that may come back here. */
typedef struct rebinding_object {
  PyObject_HEAD hcp_rebinding *rebinding;
  PyObject *table; /* of the switch under way */
  PyObject *error; /* the first exception of a callback */
  PyObject *old;   /* what get_callback has read for set_callback, borrowed */
  PyObject *range; /* a context manager around restoring, which names it in a trace, or NULL */
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
static void add_note(PyObject *exception, const char *doing, const hcp_py_slot *at,
                     PyObject *cause) {
  PyObject *note = cause == NULL
                       ? PyUnicode_FromFormat("hcp: while %s %S", doing, at->path)
                       : PyUnicode_FromFormat("hcp: then, while %s %S: %R", doing, at->path, cause);
  PyObject *done = note == NULL ? NULL : PyObject_CallMethod(exception, "add_note", "O", note);
  if (done == NULL) PyErr_Clear();
  Py_XDECREF(done);
  Py_XDECREF(note);
}

/* Keeps the exception that is set: the first one whole, others as its notes. */
static int32_t keep_exception(rebinding_object *self, const char *doing, const hcp_py_slot *at) {
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

/* Ctrl-C may arrive in a setter that could have stored the value. A slot that is
 * to get back what it held has no other chance: once more, then. */
static int put_back(rebinding_object *self, const hcp_py_slot *at, PyObject *value) {
  if (hcp_py_slot_write(at, value) == 0) return 0;
  int interrupted = !PyErr_ExceptionMatches(PyExc_Exception);
  keep_exception(self, "undoing", at);
  if (!interrupted) return -1;
  return hcp_py_slot_write(at, value) == 0 ? 0 : keep_exception(self, "undoing", at);
}

/* A setter written in Python may have stored the value before it raised, and
 * Ctrl-C may arrive right behind the store: put old back where that shows, or
 * where the slot does not say. */
static void take_back(rebinding_object *self, const hcp_py_slot *at, PyObject *value,
                      PyObject *old) {
  PyObject *now = NULL;
  int unknown = hcp_py_slot_read(at, &now) < 0;
  if (unknown) keep_exception(self, "reading", at);
  if (unknown || (now == value && now != old)) put_back(self, at, old);
  Py_XDECREF(now);
}

/* ---- the core's callbacks ---- */

static const hcp_py_slot *slot_at(const rebinding_object *self, int32_t i) {
  return &((hcp_py_slot_table *)self->table)->slots[i];
}

static int32_t get_callback(void *context, int32_t i, void **value) {
  rebinding_object *self = context;
  PyObject *held = NULL;
  if (hcp_py_slot_read(slot_at(self, i), &held) < 0)
    return keep_exception(self, "reading", slot_at(self, i));
  *value = self->old = held;
  return 0;
}

static int32_t set_callback(void *context, int32_t i, void *value) {
  rebinding_object *self = context;
  const hcp_py_slot *at = slot_at(self, i);
  if (self->error != NULL || self->rebinding != NULL) return put_back(self, at, value);
  if (at->kind == HCP_PY_SLOT_ABSENT) value = NULL;
  if (hcp_py_slot_write(at, value) == 0) return 0;
  keep_exception(self, "rebinding", at);
  if (!hcp_py_slot_is_exact(at)) take_back(self, at, value, self->old);
  return -1;
}

static void release_callback(void *context, void *value) {
  (void)context;
  Py_XDECREF((PyObject *)value);
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

/* 0: left in order. More: how many switches that were made inside this one are
 * still open. Less: this one was undone already, with one that is outside it. */
static long open_inside(const rebinding_object *self) {
  const hcp_py_slot_table *table = (hcp_py_slot_table *)self->table;
  const hcp_py_slot *at = table->n == 0 ? NULL : &table->slots[table->n - 1];
  PyObject *now = NULL;
  if (at == NULL || at->kind != HCP_PY_SLOT_DEPTH) return 0;
  PyObject *raised = take_exception();
  long depth = 0, own = PyLong_AsLong(table->values[table->n - 1]);
  if (hcp_py_slot_read(at, &now) == 0) depth = PyLong_AsLong(now);
  Py_XDECREF(now);
  if (PyErr_Occurred()) {
    PyErr_Clear(); /* whoever takes the mark away gets the plain switch */
    depth = own;
  }
  raise_exception(raised);
  return depth - own;
}

static int raise_order(long inside) {
  if (inside > 0)
    PyErr_Format(PyExc_RuntimeError,
                 "a context was left while %ld that were entered inside it are open: every slot "
                 "holds what it held before the outer one; leave the inner one first",
                 inside);
  else
    PyErr_SetString(PyExc_RuntimeError,
                    "a context was left after the one that it was entered in, which had restored "
                    "every slot: nothing was changed; leave the inner one first");
  return -1;
}

/* What a context outside this one has restored stays. */
static hcp_status restore_slots(rebinding_object *self, long inside, hcp_error *err) {
  if (inside < 0) return HCP_OK;
  self->busy = 1;
  hcp_status status = hcp_rebinding_restore(self->rebinding, err);
  self->busy = 0;
  return status;
}

/* Takes the reference. What a range raises, Ctrl-C in it included, must not keep slots from being
 * restored: it is raised after. */
static void keep_from_range(rebinding_object *self, PyObject *done) {
  if (done == NULL) {
    PyObject *exception = take_exception();
    if (self->error == NULL)
      self->error = exception;
    else
      Py_XDECREF(exception);
  }
  Py_XDECREF(done);
}

static PyObject *enter_range(rebinding_object *self) {
  PyObject *range = self->range;
  if (range == NULL) return NULL;
  self->range = NULL;
  self->busy = 1;
  keep_from_range(self, PyObject_CallMethod(range, "__enter__", NULL));
  self->busy = 0;
  return range;
}

/* Takes the reference. NULL: there is none. */
static void leave_range(rebinding_object *self, PyObject *range) {
  if (range == NULL) return;
  keep_from_range(self, PyObject_CallMethod(range, "__exit__", "OOO", Py_None, Py_None, Py_None));
  Py_DECREF(range);
}

static int restore(rebinding_object *self) {
  hcp_error err;
  if (self->rebinding == NULL || self->busy) return 0;
  PyObject *range = enter_range(self);
  long inside = open_inside(self);
  hcp_status status = restore_slots(self, inside, &err);
  hcp_rebinding_destroy(self->rebinding);
  self->rebinding = NULL;
  Py_CLEAR(self->table);
  leave_range(self, range);
  if (status == HCP_OK && self->error == NULL) return inside == 0 ? 0 : raise_order(inside);
  raise_kept(self, &err);
  return -1;
}

static int check_free(const rebinding_object *self) {
  if (!self->busy && self->rebinding == NULL) return 0;
  PyErr_Format(PyExc_RuntimeError, "this rebinding holds %d slots already, restore() comes first",
               (int)hcp_rebinding_pending(self->rebinding));
  return -1;
}

/* Takes the reference to table. */
static int switch_table(rebinding_object *self, hcp_py_slot_table *table) {
  const hcp_slots callbacks = {get_callback, set_callback, release_callback, self};
  hcp_error err;
  self->table = (PyObject *)table;
  self->busy = 1;
  hcp_status status = hcp_rebinding_create(&callbacks, (void *const *)table->values,
                                           (int32_t)table->n, &self->rebinding, &err);
  self->busy = 0;
  if (status == HCP_OK) return 0;
  Py_CLEAR(self->table);
  raise_kept(self, &err);
  return -1;
}

/* A SlotTable, or slots and values to make one of: a new reference. */
static hcp_py_slot_table *table_of_arguments(PyObject *args) {
  PyObject *slots, *values = NULL;
  if (!PyArg_ParseTuple(args, "O|O:switch", &slots, &values)) return NULL;
  hcp_py_slot_table *given = hcp_py_slot_table_of(slots);
  if (given != NULL && values == NULL) return (hcp_py_slot_table *)Py_NewRef(slots);
  if (values != NULL) return (hcp_py_slot_table *)hcp_py_slot_table_new(slots, values);
  PyErr_Format(PyExc_TypeError, "switch() was given %R, expected a SlotTable, or slots and values",
               slots);
  return NULL;
}

static PyObject *rebinding_switch(PyObject *object, PyObject *args) {
  rebinding_object *self = (rebinding_object *)object;
  if (check_free(self) < 0) return NULL;
  hcp_py_slot_table *table = table_of_arguments(args);
  if (table == NULL) return NULL;
  /* Making a table runs the code of its iterables. */
  if (check_free(self) < 0) {
    Py_DECREF(table);
    return NULL;
  }
  return switch_table(self, table) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *rebinding_restore(PyObject *self, PyObject *unused) {
  (void)unused;
  return restore((rebinding_object *)self) < 0 ? NULL : Py_NewRef(Py_None);
}

/* Forgets without restoring: for collectors, after the finalizer has restored. */
static int rebinding_clear(PyObject *object) {
  rebinding_object *self = (rebinding_object *)object;
  hcp_rebinding *rebinding = self->rebinding;
  self->rebinding = NULL;
  hcp_rebinding_destroy(rebinding);
  Py_CLEAR(self->table);
  Py_CLEAR(self->error);
  Py_CLEAR(self->range);
  return 0;
}

/* What is kept is no open switch. */
static int close_depth(const rebinding_object *self) {
  int32_t last = hcp_rebinding_pending(self->rebinding) - 1;
  if (last < 0 || slot_at(self, last)->kind != HCP_PY_SLOT_DEPTH || open_inside(self) != 0)
    return 0;
  return hcp_py_slot_write(slot_at(self, last), hcp_rebinding_held(self->rebinding, last));
}

static PyObject *rebinding_keep(PyObject *object, PyObject *unused) {
  rebinding_object *self = (rebinding_object *)object;
  (void)unused;
  if (self->busy) {
    PyErr_SetString(PyExc_RuntimeError, "this rebinding is just being switched");
    return NULL;
  }
  int status = close_depth(self);
  rebinding_clear(object);
  return status < 0 ? NULL : Py_NewRef(Py_None);
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

static PyObject *get_range(PyObject *self, void *unused) {
  (void)unused;
  PyObject *range = ((rebinding_object *)self)->range;
  return Py_NewRef(range == NULL ? Py_None : range);
}

static int set_range(PyObject *object, PyObject *value, void *unused) {
  rebinding_object *self = (rebinding_object *)object;
  (void)unused;
  PyObject *before = self->range;
  self->range = value == NULL || value == Py_None ? NULL : Py_NewRef(value);
  Py_XDECREF(before);
  return 0;
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
  Py_VISIT(self->table);
  Py_VISIT(self->range);
  for (int32_t i = 0; i < hcp_rebinding_pending(self->rebinding); i++)
    Py_VISIT((PyObject *)hcp_rebinding_held(self->rebinding, i));
  return 0;
}

/* A switch that nobody holds any more is undone: Ctrl-C may arrive between the
 * switch and the statement that was to keep it. The hook is given the type: an
 * object that is being deallocated must not be handed out. */
static void rebinding_finalize(PyObject *self) {
  PyObject *raised = take_exception();
  if (restore((rebinding_object *)self) < 0) PyErr_WriteUnraisable((PyObject *)Py_TYPE(self));
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
     "switch($self, slots, values=..., /)\n--\n\n"
     "Put values[i] in slots[i], all or none; or a SlotTable's values in its slots."},
    {"restore", rebinding_restore, METH_NOARGS,
     "restore($self, /)\n--\n\nGive every slot what it held, last first. Twice does nothing."},
    {"keep", rebinding_keep, METH_NOARGS,
     "keep($self, /)\n--\n\nForget what the slots held: the switch stays."},
    {"__enter__", rebinding_enter, METH_NOARGS, "__enter__($self, /)\n--\n\nThe rebinding."},
    {"__exit__", rebinding_exit, METH_VARARGS, "__exit__($self, /, *exception)\n--\n\nRestores."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef rebinding_getset[] = {
    {"pending", get_pending, NULL, "Slots still to be restored.", NULL},
    {"range", get_range, set_range, "A context manager around the next restoring, or None.", NULL},
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
     "setattr, 'member' the same past a class's own __setattr__, 'entry' an item\n"
     "that may be missing before, 'absent' one that is missing inside, 'depth' an\n"
     "item that counts open switches; path names it in errors. Restores on leaving a\n"
     "with block, and when it is dropped."},
    {0, NULL}};

static PyType_Spec rebinding_spec = {
    "hcp._core.Rebinding", sizeof(rebinding_object), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    rebinding_slots};

int hcp_py_add_rebinding(PyObject *module) {
  return hcp_py_add_type(module, "Rebinding", &rebinding_spec);
}
