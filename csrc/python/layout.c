/* layout.c - Layout: the rows that one rank holds in one micro-batch. */
#include "glue.h"

typedef struct layout_object {
  PyObject_HEAD hcp_layout *layout;
} layout_object;

static hcp_layout *layout_of(PyObject *self) { return ((layout_object *)self)->layout; }

static void layout_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  hcp_layout_destroy(layout_of(self));
  PyObject_Free(self);
  Py_DECREF(type);
}

static PyObject *layout_create(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"plan", "micro_batch", "rank", NULL};
  PyObject *plan_object, *micro_batch_object, *rank_object;
  int32_t micro_batch, rank;
  hcp_layout *layout;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO:create_layout", keywords, &plan_object,
                                   &micro_batch_object, &rank_object) ||
      hcp_py_int32(micro_batch_object, "micro_batch", &micro_batch) < 0 ||
      hcp_py_int32(rank_object, "rank", &rank) < 0)
    return NULL;
  const hcp_plan *plan = hcp_py_plan(module, plan_object);
  if (plan == NULL) return NULL;
  HCP_PY_WITHOUT_GIL(plan_object, status,
                     hcp_layout_create(plan, micro_batch, rank, &layout, &err));
  if (status != HCP_OK) return hcp_py_raise(&err);
  PyObject *object = hcp_py_new(module, "Layout");
  if (object == NULL)
    hcp_layout_destroy(layout);
  else
    ((layout_object *)object)->layout = layout;
  return object;
}

/* ---- attributes ---- */

#define INTEGER_ATTRIBUTES(X) X(rank) X(micro_batch) X(first_rank) X(degree) X(rows) X(padding)

#define GETTER(name)                                          \
  static PyObject *get_##name(PyObject *self, void *unused) { \
    (void)unused;                                             \
    return PyLong_FromLongLong(layout_of(self)->name);        \
  }
INTEGER_ATTRIBUTES(GETTER)
#undef GETTER

/* Writable, since tensors are: torch knows no tensor that must not be written. */
static PyObject *export(PyObject *self, const void *data, int64_t rows, char format) {
  return hcp_py_view(PyType_GetModule(Py_TYPE(self)), self, (void *)(uintptr_t)data,
                     (Py_ssize_t)rows, 1, format, 1);
}

static PyObject *get_sequences(PyObject *self, void *unused) {
  (void)unused;
  return export(self, layout_of(self)->sequences, layout_of(self)->sequence_count, 'i');
}

static PyObject *get_lengths(PyObject *self, void *unused) {
  (void)unused;
  return export(self, layout_of(self)->lengths, layout_of(self)->sequence_count, 'q');
}

static PyObject *get_cu_seqlens(PyObject *self, void *unused) {
  (void)unused;
  return export(self, layout_of(self)->cu_seqlens, (int64_t)layout_of(self)->sequence_count + 1,
                'i');
}

static PyObject *get_positions(PyObject *self, void *unused) {
  (void)unused;
  return export(self, layout_of(self)->positions, layout_of(self)->rows, 'q');
}

static PyObject *get_paddings(PyObject *self, void *unused) {
  (void)unused;
  return export(self, layout_of(self)->paddings, layout_of(self)->degree, 'q');
}

static PyObject *tuple_of(const hcp_layout *layout, const hcp_span *of, int32_t count) {
  PyObject *spans = PyTuple_New(count);
  if (spans == NULL) return NULL;
  for (Py_ssize_t i = 0; i < count; i++) {
    const hcp_span *span = &of[i];
    PyObject *item = Py_BuildValue("(iLL)", (int)layout->sequences[span->index],
                                   (long long)span->start, (long long)span->rows);
    if (item == NULL || PyTuple_SetItem(spans, i, item) < 0) {
      Py_DECREF(spans);
      return NULL;
    }
  }
  return spans;
}

static PyObject *get_spans(PyObject *self, void *unused) {
  (void)unused;
  return tuple_of(layout_of(self), layout_of(self)->spans, layout_of(self)->span_count);
}

static PyObject *get_documents(PyObject *self, void *unused) {
  (void)unused;
  return tuple_of(layout_of(self), layout_of(self)->documents, layout_of(self)->document_count);
}

static PyObject *get_span_documents(PyObject *self, void *unused) {
  (void)unused;
  const hcp_layout *layout = layout_of(self);
  PyObject *numbers = PyTuple_New(layout->span_count);
  for (Py_ssize_t i = 0; numbers != NULL && i < layout->span_count; i++) {
    PyObject *number = PyLong_FromLong(layout->spans[i].document);
    if (number == NULL || PyTuple_SetItem(numbers, i, number) < 0) Py_CLEAR(numbers);
  }
  return numbers;
}

static PyObject *get_stretches(PyObject *self, void *unused) {
  (void)unused;
  return tuple_of(layout_of(self), layout_of(self)->stretches, layout_of(self)->stretch_count);
}

static PyObject *get_parents(PyObject *self, void *unused) {
  (void)unused;
  return export(self, layout_of(self)->parents, layout_of(self)->stretch_count, 'i');
}

static PyGetSetDef layout_getset[] = {
#define ATTRIBUTE(name) {#name, get_##name, NULL, NULL, NULL},
    INTEGER_ATTRIBUTES(ATTRIBUTE)
#undef ATTRIBUTE
        {"sequences", get_sequences, NULL, "int32: indices of the plan's lengths.", NULL},
    {"lengths", get_lengths, NULL, "int64: tokens of each sequence.", NULL},
    {"cu_seqlens", get_cu_seqlens, NULL, "int32: local rows of each sequence, summed.", NULL},
    {"positions", get_positions, NULL, "int64: each row's place in its sequence.", NULL},
    {"paddings", get_paddings, NULL, "int64: rows that alignment adds on each rank.", NULL},
    {"spans", get_spans, NULL, "Runs of tokens as (sequence, start, rows).", NULL},
    {"documents", get_documents, NULL, "The group's documents as (sequence, start, rows).", NULL},
    {"stretches", get_stretches, NULL, "The group's stretches as (sequence, start, rows).", NULL},
    {"parents", get_parents, NULL, "int32: the stretch that each continues, -1: none.", NULL},
    {"span_documents", get_span_documents, NULL, "Each span's document among these.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot layout_slots[] = {{Py_tp_dealloc, HCP_PY_SLOT(layout_dealloc)},
                                     {Py_tp_getset, layout_getset},
                                     {Py_tp_doc, "What one rank holds in one micro-batch."},
                                     {0, NULL}};

static PyType_Spec layout_spec = {
    "hcp._core.Layout", sizeof(layout_object), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    layout_slots};

static PyMethodDef functions[] = {
    {"create_layout", (PyCFunction)(void (*)(void))layout_create, METH_VARARGS | METH_KEYWORDS,
     "What a rank holds in a micro-batch of a plan."},
    {NULL, NULL, 0, NULL}};

int hcp_py_add_layout(PyObject *module) {
  if (hcp_py_add_type(module, "Layout", &layout_spec) < 0) return -1;
  return PyModule_AddFunctions(module, functions);
}
