/* module.c - hcp._core: values in, values out, statuses to exceptions. */
#include <string.h>

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
  /* A message that was cut may end inside a character. */
  PyObject *text = PyUnicode_DecodeUTF8(err->message, (Py_ssize_t)strlen(err->message), "replace");
  if (text != NULL) PyErr_SetObject(kind, text);
  Py_XDECREF(text);
  return NULL;
}

/* ---- types ---- */

int hcp_py_add_type(PyObject *module, const char *name, PyType_Spec *spec) {
  return hcp_py_add_owned(module, name, PyType_FromModuleAndSpec(module, spec, NULL));
}

PyObject *hcp_py_new(PyObject *module, const char *name) {
  PyObject *type = PyObject_GetAttrString(module, name);
  if (type == NULL) return NULL;
  PyObject *object = PyType_GenericAlloc((PyTypeObject *)type, 0);
  Py_DECREF(type);
  return object;
}

/* ---- integers ---- */

/* What a message calls an argument, or item i of it. */
static PyObject *place_of(const char *name, Py_ssize_t i) {
  return i < 0 ? PyUnicode_FromString(name) : PyUnicode_FromFormat("%s[%zd]", name, i);
}

static void refuse_item(const char *name, Py_ssize_t i, PyObject *item, const char *expected) {
  PyObject *place = place_of(name, i);
  if (place == NULL) return;
  PyErr_Format(PyExc_ValueError, "%U is %R, expected %s", place, item, expected);
  Py_DECREF(place);
}

/* i is -1 for an argument that is no item. */
static int integer_of(PyObject *item, const char *name, Py_ssize_t i, int bits, int64_t *value) {
  PyObject *index = PyLong_CheckExact(item) ? Py_NewRef(item)
                    : PyBool_Check(item)    ? NULL
                                            : PyNumber_Index(item);
  if (index == NULL && (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_TypeError))) {
    PyErr_Clear();
    refuse_item(name, i, item, "an integer");
  }
  if (index == NULL) return -1;
  int overflow;
  *value = PyLong_AsLongLongAndOverflow(index, &overflow);
  Py_DECREF(index);
  if (bits == 32 && (*value < INT32_MIN || *value > INT32_MAX)) overflow = 1;
  if (overflow == 0) return PyErr_Occurred() ? -1 : 0;
  refuse_item(name, i, item, bits == 32 ? "-2^31 to 2^31 - 1" : "-2^63 to 2^63 - 1");
  return -1;
}

int hcp_py_int64(PyObject *item, const char *name, int64_t *value) {
  return integer_of(item, name, -1, 64, value);
}

int hcp_py_int32(PyObject *item, const char *name, int32_t *value) {
  int64_t wide;
  if (integer_of(item, name, -1, 32, &wide) < 0) return -1;
  *value = (int32_t)wide;
  return 0;
}

static void put(void *array, Py_ssize_t i, int bits, int64_t value) {
  if (bits == 32)
    ((int32_t *)array)[i] = (int32_t)value;
  else
    ((int64_t *)array)[i] = value;
}

/* Whether a sequence is n int32 or int64 in memory, end to end; then *buffer is held. */
static int holds_integers(PyObject *sequence, Py_ssize_t n, Py_buffer *buffer) {
  if (!PyObject_CheckBuffer(sequence)) return 0;
  if (PyObject_GetBuffer(sequence, buffer, PyBUF_ND | PyBUF_FORMAT) < 0) {
    PyErr_Clear(); /* read item by item */
    return 0;
  }
  const char *format = buffer->format;
  if (buffer->ndim == 1 && buffer->shape[0] == n && format != NULL && format[0] != '\0' &&
      format[1] == '\0' && strchr("ilq", format[0]) != NULL &&
      (buffer->itemsize == 4 || buffer->itemsize == 8))
    return 1;
  PyBuffer_Release(buffer);
  return 0;
}

static int copy_buffer(const Py_buffer *buffer, const char *name, int bits, void *array,
                       Py_ssize_t n) {
  if (buffer->itemsize == bits / 8) {
    if (n > 0) memcpy(array, buffer->buf, (size_t)n * (size_t)buffer->itemsize);
    return 0;
  }
  for (Py_ssize_t i = 0; i < n; i++) {
    int64_t value = buffer->itemsize == 8 ? ((const int64_t *)buffer->buf)[i]
                                          : ((const int32_t *)buffer->buf)[i];
    if (bits == 32 && (value < INT32_MIN || value > INT32_MAX)) {
      PyObject *item = PyLong_FromLongLong(value);
      if (item != NULL) refuse_item(name, i, item, "-2^31 to 2^31 - 1");
      Py_XDECREF(item);
      return -1;
    }
    put(array, i, bits, value);
  }
  return 0;
}

static int copy_items(PyObject *sequence, const char *name, int bits, void *array, Py_ssize_t n) {
  int is_list = PyList_CheckExact(sequence);
  for (Py_ssize_t i = 0; i < n; i++) {
    int64_t value;
    PyObject *item =
        is_list ? Py_XNewRef(PyList_GetItem(sequence, i)) : PySequence_GetItem(sequence, i);
    int status = item == NULL ? -1 : integer_of(item, name, i, bits, &value);
    Py_XDECREF(item);
    if (status < 0) return -1;
    put(array, i, bits, value);
  }
  return 0;
}

/* A new array of items of that width. */
static int integers_of(PyObject *sequence, const char *name, int bits, void **values,
                       Py_ssize_t *n) {
  size_t width = bits == 32 ? sizeof(int32_t) : sizeof(int64_t);
  Py_ssize_t count = PySequence_Check(sequence) ? PySequence_Size(sequence) : -1;
  if (count < 0 && !PyErr_Occurred())
    PyErr_Format(PyExc_ValueError, "%s is %R, expected a sequence of integers", name, sequence);
  if (count > INT32_MAX) {
    PyErr_Format(PyExc_ValueError, "%s has %zd items, expected at most 2^31 - 1", name, count);
    return -1;
  }
  if (count < 0) return -1;
  void *array = PyMem_Malloc(((size_t)count + 1) * width);
  if (array == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  Py_buffer buffer;
  int status;
  if (holds_integers(sequence, count, &buffer)) {
    status = copy_buffer(&buffer, name, bits, array, count);
    PyBuffer_Release(&buffer);
  } else {
    status = copy_items(sequence, name, bits, array, count);
  }
  if (status < 0) {
    PyMem_Free(array);
    return -1;
  }
  *values = array;
  *n = count;
  return 0;
}

int hcp_py_int64s(PyObject *sequence, const char *name, int64_t **values, Py_ssize_t *n) {
  void *array;
  if (integers_of(sequence, name, 64, &array, n) < 0) return -1;
  *values = array;
  return 0;
}

int hcp_py_int32s(PyObject *sequence, const char *name, int32_t **values, Py_ssize_t *n) {
  void *array;
  if (integers_of(sequence, name, 32, &array, n) < 0) return -1;
  *values = array;
  return 0;
}

static PyObject *int32s(PyObject *module, PyObject *args) {
  PyObject *sequence;
  const char *name;
  int32_t *values;
  Py_ssize_t n;
  (void)module;
  if (!PyArg_ParseTuple(args, "Os:int32s", &sequence, &name) ||
      hcp_py_int32s(sequence, name, &values, &n) < 0)
    return NULL;
  PyObject *bytes = PyBytes_FromStringAndSize((const char *)values, n * (Py_ssize_t)sizeof *values);
  PyMem_Free(values);
  return bytes;
}

static PyMethodDef functions[] = {
    {"int32s", int32s, METH_VARARGS, "A sequence of integers as int32, end to end."},
    {NULL, NULL, 0, NULL}};

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
    buffer->obj = NULL;
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

static PyType_Spec view_spec = {
    "hcp._core._View", sizeof(view), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, view_slots};

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

int hcp_py_add_owned(PyObject *module, const char *name, PyObject *value) {
  if (value == NULL) return -1;
  int status = PyModule_AddObjectRef(module, name, value);
  Py_DECREF(value);
  return status;
}

int hcp_py_add_names(PyObject *module, const char *name, const char *const *names, Py_ssize_t n) {
  PyObject *tuple = PyTuple_New(n);
  int status = tuple == NULL ? -1 : 0;
  for (Py_ssize_t i = 0; i < n && status == 0; i++) {
    PyObject *text = PyUnicode_FromString(names[i]);
    status = text == NULL ? -1 : PyTuple_SetItem(tuple, i, text);
  }
  if (status < 0) Py_CLEAR(tuple);
  return hcp_py_add_owned(module, name, tuple);
}

/* Set by setup.py; a compiler that only reads the file has none. */
#ifndef HCP_CORE_HASH
#define HCP_CORE_HASH ""
#endif

static int add_hash(PyObject *module) {
  return PyModule_AddStringConstant(module, "CORE_HASH", HCP_CORE_HASH);
}

static int add_functions(PyObject *module) { return PyModule_AddFunctions(module, functions); }

static int add_view(PyObject *module) { return hcp_py_add_type(module, "_View", &view_spec); }

static int execute(PyObject *module) {
  static int (*const parts[])(PyObject *) = {
      add_hash,          add_functions,        add_view,
      hcp_py_add_plan,   hcp_py_add_layout,    hcp_py_add_payload,
      hcp_py_add_prices, hcp_py_add_table,     hcp_py_add_launches,
      hcp_py_add_link,   hcp_py_add_trees,     hcp_py_add_grid,
      hcp_py_add_slots,  hcp_py_add_structure, hcp_py_add_rebinding,
      hcp_py_add_holders};
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
