/* module.c - hcp._core: values in, values out, statuses to exceptions. */
#include "glue.h"

PyObject *hcp_py_raise(const hcp_error *err) {
  if (PyErr_Occurred()) return NULL;
  PyObject *kind = PyExc_RuntimeError;
  switch (err->status) {
    case HCP_INVALID:
    case HCP_INFEASIBLE:
      kind = PyExc_ValueError;
      break;
    case HCP_NO_MEMORY:
      kind = PyExc_MemoryError;
      break;
    case HCP_OVERFLOW:
      kind = PyExc_OverflowError;
      break;
    case HCP_OK:
    case HCP_CALLBACK:
    case HCP_DEVICE:
      break;
  }
  PyErr_SetString(kind, err->message);
  return NULL;
}

/* ---- types ---- */

int hcp_py_add_type(PyObject *module, const char *name, PyType_Spec *spec) {
  PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
  if (type == NULL) return -1;
  int status = PyModule_AddObjectRef(module, name, type);
  Py_DECREF(type);
  return status;
}

PyObject *hcp_py_new(PyObject *module, const char *name) {
  PyObject *type = PyObject_GetAttrString(module, name);
  if (type == NULL) return NULL;
  PyObject *object = PyType_GenericAlloc((PyTypeObject *)type, 0);
  Py_DECREF(type);
  return object;
}

/* ---- sequences of integers ---- */

static int int64_at(PyObject *sequence, const char *name, Py_ssize_t i, int64_t *value) {
  PyObject *item = PySequence_GetItem(sequence, i);
  if (item == NULL) return -1;
  PyObject *index = PyNumber_Index(item);
  if (index == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "%s[%zd] is %R, expected an integer", name, i, item);
  }
  Py_DECREF(item);
  if (index == NULL) return -1;
  int overflow;
  *value = PyLong_AsLongLongAndOverflow(index, &overflow);
  Py_DECREF(index);
  if (overflow == 0) return PyErr_Occurred() ? -1 : 0;
  PyErr_Format(PyExc_ValueError, "%s[%zd] does not fit in 64 bits", name, i);
  return -1;
}

int hcp_py_int64s(PyObject *sequence, const char *name, int64_t **values, Py_ssize_t *n) {
  if (!PySequence_Check(sequence)) {
    PyErr_Format(PyExc_TypeError, "%s is not a sequence of integers", name);
    return -1;
  }
  Py_ssize_t count = PySequence_Size(sequence);
  if (count < 0) return -1;
  if (count > INT32_MAX) {
    PyErr_Format(PyExc_ValueError, "%s has %zd items, expected at most 2^31 - 1", name, count);
    return -1;
  }
  int64_t *array = PyMem_Malloc(((size_t)count + 1) * sizeof *array);
  if (array == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; i++)
    if (int64_at(sequence, name, i, &array[i]) < 0) goto fail_item;
  *values = array;
  *n = count;
  return 0;

fail_item:
  PyMem_Free(array);
  return -1;
}

int hcp_py_int32s(PyObject *sequence, const char *name, int32_t **values, Py_ssize_t *n) {
  int64_t *wide;
  Py_ssize_t count;
  if (hcp_py_int64s(sequence, name, &wide, &count) < 0) return -1;
  int32_t *array = PyMem_Malloc(((size_t)count + 1) * sizeof *array);
  if (array == NULL) {
    PyErr_NoMemory();
    goto fail_array;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    if (wide[i] < INT32_MIN || wide[i] > INT32_MAX) {
      PyErr_Format(PyExc_ValueError, "%s[%zd] is %lld, expected it to fit in 32 bits", name, i,
                   (long long)wide[i]);
      goto fail_item;
    }
    array[i] = (int32_t)wide[i];
  }
  PyMem_Free(wide);
  *values = array;
  *n = count;
  return 0;

fail_item:
  PyMem_Free(array);
fail_array:
  PyMem_Free(wide);
  return -1;
}

/* ---- views ---- */

/* Memory of an owner, exported through the buffer protocol. */
typedef struct view {
  PyObject_HEAD PyObject *owner;
  void *data;
  Py_ssize_t shape[2], strides[2];
  int dimensions, writable;
  char format[2];
} view;

static int view_getbuffer(PyObject *self, Py_buffer *buffer, int flags) {
  view *v = (view *)self;
  if ((flags & PyBUF_WRITABLE) == PyBUF_WRITABLE && !v->writable) {
    PyErr_SetString(PyExc_BufferError, "this memory belongs to an immutable value");
    return -1;
  }
  buffer->obj = Py_NewRef(self);
  buffer->buf = v->data;
  buffer->itemsize = v->strides[v->dimensions - 1];
  buffer->len = v->shape[0] * v->strides[0];
  buffer->readonly = !v->writable;
  buffer->ndim = v->dimensions;
  buffer->format = (flags & PyBUF_FORMAT) == PyBUF_FORMAT ? v->format : NULL;
  buffer->shape = v->shape;
  buffer->strides = v->strides;
  buffer->suboffsets = NULL;
  buffer->internal = NULL;
  return 0;
}

static void view_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  Py_XDECREF(((view *)self)->owner);
  PyObject_Free(self);
  Py_DECREF(type);
}

static PyType_Slot view_slots[] = {{Py_bf_getbuffer, HCP_PY_SLOT(view_getbuffer)},
                                   {Py_tp_dealloc, HCP_PY_SLOT(view_dealloc)},
                                   {Py_tp_doc, "Memory of another object."},
                                   {0, NULL}};

static PyType_Spec view_spec = {"hcp._core._View", sizeof(view), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, view_slots};

PyObject *hcp_py_view(PyObject *module, PyObject *owner, void *data, Py_ssize_t rows,
                      Py_ssize_t width, char format, int writable) {
  view *v = (view *)hcp_py_new(module, "_View");
  if (v == NULL) return NULL;
  Py_ssize_t itemsize = format == 'q' ? 8 : 4;
  v->owner = Py_NewRef(owner);
  v->data = data;
  v->dimensions = width == 1 ? 1 : 2;
  v->shape[0] = rows;
  v->shape[1] = width;
  v->strides[0] = width * itemsize;
  v->strides[1] = itemsize;
  v->writable = writable;
  v->format[0] = format;
  PyObject *memory = PyMemoryView_FromObject((PyObject *)v);
  Py_DECREF(v);
  return memory;
}

/* ---- module ---- */

/* Sections as ((name, words per record), ...), in the order of their numbers. */
static PyObject *sections_tuple(const char *const *names, const int *widths, Py_ssize_t n) {
  PyObject *tuple = PyTuple_New(n);
  if (tuple == NULL) return NULL;
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject *section = Py_BuildValue("(si)", names[i], widths[i]);
    if (section == NULL || PyTuple_SetItem(tuple, i, section) < 0) goto fail_item;
  }
  return tuple;

fail_item:
  Py_DECREF(tuple);
  return NULL;
}

static int add_owned(PyObject *module, const char *name, PyObject *value) {
  if (value == NULL) return -1;
  int status = PyModule_AddObjectRef(module, name, value);
  Py_DECREF(value);
  return status;
}

static int add_constants(PyObject *module) {
#define NAME(name, width) #name,
#define WIDTH(name, width) width,
#define TEXT(name, text) text,
  static const char *const route_names[] = {HCP_ROUTE_SECTIONS(NAME)};
  static const int route_widths[] = {HCP_ROUTE_SECTIONS(WIDTH)};
  static const char *const schedule_names[] = {HCP_SCHEDULE_SECTIONS(NAME)};
  static const int schedule_widths[] = {HCP_SCHEDULE_SECTIONS(WIDTH)};
  static const char *const comm_types[] = {HCP_COMM_TYPES(TEXT)};
#undef NAME
#undef WIDTH
#undef TEXT
  PyObject *types = PyTuple_New(HCP_COMM_TYPE_COUNT);
  if (types == NULL) return -1;
  for (Py_ssize_t i = 0; i < HCP_COMM_TYPE_COUNT; i++) {
    PyObject *text = PyUnicode_FromString(comm_types[i]);
    if (text == NULL || PyTuple_SetItem(types, i, text) < 0) {
      Py_DECREF(types);
      return -1;
    }
  }
  if (add_owned(module, "COMM_TYPES", types) < 0) return -1;
  if (add_owned(module, "ROUTE_SECTIONS",
                sections_tuple(route_names, route_widths, HCP_ROUTE_SECTION_COUNT)) < 0)
    return -1;
  return add_owned(module, "SCHEDULE_SECTIONS",
                   sections_tuple(schedule_names, schedule_widths, HCP_SCHEDULE_SECTION_COUNT));
}

static int add_view(PyObject *module) { return hcp_py_add_type(module, "_View", &view_spec); }

static int execute(PyObject *module) {
  static int (*const parts[])(PyObject *) = {
      add_constants,       add_view,        hcp_py_add_plan,  hcp_py_add_layout,
      hcp_py_add_table,    hcp_py_add_grid, hcp_py_add_slots, hcp_py_add_structure,
      hcp_py_add_rebinding};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
    if (parts[i](module) < 0) return -1;
  return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, HCP_PY_SLOT(execute)}, {0, NULL}};

static PyModuleDef module_def = {PyModuleDef_HEAD_INIT, .m_name = "hcp._core",
                                 .m_doc =
                                     "The C core of hcp: plans, layouts, tables, grids, "
                                     "rebindings.",
                                 .m_size = 0, .m_slots = module_slots};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&module_def); }
