/* plan.c - Plan: an immutable value, and the tables that follow from it. */
#include <string.h>

#include "glue.h"

typedef struct plan_object {
  PyObject_HEAD hcp_plan *plan;
} plan_object;

static const hcp_plan *plan_of(PyObject *self) { return ((plan_object *)self)->plan; }

static PyObject *module_of(PyObject *self) { return PyType_GetModule(Py_TYPE(self)); }

static void plan_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  hcp_plan_destroy(((plan_object *)self)->plan);
  PyObject_Free(self);
  Py_DECREF(type);
}

const hcp_plan *hcp_py_plan(PyObject *module, PyObject *object) {
  PyObject *type = PyObject_GetAttrString(module, "Plan");
  if (type == NULL) return NULL;
  int is_plan = PyObject_TypeCheck(object, (PyTypeObject *)type);
  Py_DECREF(type);
  if (is_plan) return plan_of(object);
  PyErr_SetString(PyExc_TypeError, "expected a Plan of hcp._core");
  return NULL;
}

/* ---- creation ---- */

typedef struct request {
  hcp_limits limits;
  hcp_cost cost;
  int64_t *lengths;
  Py_ssize_t n;
} request;

#define REQUEST_KEYWORDS                                                                  \
  "lengths", "ranks", "max_tokens_per_rank", "min_degree", "max_degree", "pair", "token", \
      "exchange", "launch"
#define REQUEST_FORMAT "OiLiiLLLL"
#define REQUEST_ARGUMENTS(r, lengths)                                                         \
  &(lengths), &(r).limits.ranks, &max_tokens, &(r).limits.min_degree, &(r).limits.max_degree, \
      &prices[0], &prices[1], &prices[2], &prices[3]

static int request_fill(request *r, PyObject *lengths, long long max_tokens,
                        const long long prices[4]) {
  r->limits.max_tokens_per_rank = max_tokens;
  r->cost = (hcp_cost){prices[0], prices[1], prices[2], prices[3]};
  return hcp_py_int64s(lengths, "lengths", &r->lengths, &r->n);
}

/* Takes over the plan. */
static PyObject *wrap(PyObject *module, hcp_plan *plan) {
  PyObject *object = hcp_py_new(module, "Plan");
  if (object == NULL)
    hcp_plan_destroy(plan);
  else
    ((plan_object *)object)->plan = plan;
  return object;
}

static PyObject *plan_create(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {REQUEST_KEYWORDS, NULL};
  PyObject *lengths;
  long long max_tokens, prices[4];
  request r;
  hcp_plan *plan = NULL;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, REQUEST_FORMAT ":create_plan", keywords,
                                   REQUEST_ARGUMENTS(r, lengths)) ||
      request_fill(&r, lengths, max_tokens, prices) < 0)
    return NULL;
  hcp_status status;
  Py_BEGIN_ALLOW_THREADS;
  status = hcp_plan_create(r.lengths, (int32_t)r.n, &r.limits, &r.cost, &plan, &err);
  Py_END_ALLOW_THREADS;
  PyMem_Free(r.lengths);
  return status == HCP_OK ? wrap(module, plan) : hcp_py_raise(&err);
}

/* groups are records of (first_rank, degree, sequences), micro_batches how many
 * of them each micro-batch has. */
static hcp_plan *plan_from(const request *r, const int32_t *batches, Py_ssize_t batch_count,
                           const int32_t *groups, Py_ssize_t group_count, const int32_t *sequences,
                           hcp_error *err) {
  hcp_plan *plan = NULL;
  int32_t first_group = 0, first_sequence = 0;
  hcp_micro_batch *batch = PyMem_Calloc((size_t)batch_count + 1, sizeof *batch);
  hcp_group *group = PyMem_Calloc((size_t)group_count + 1, sizeof *group);
  if (batch == NULL || group == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  for (Py_ssize_t m = 0; m < batch_count; first_group += batches[m++])
    batch[m] = (hcp_micro_batch){first_group, batches[m]};
  for (Py_ssize_t g = 0; g < group_count; first_sequence += groups[3 * g++ + 2])
    group[g] = (hcp_group){groups[3 * g], groups[3 * g + 1], first_sequence, groups[3 * g + 2]};
  if (hcp_plan_create_from(r->lengths, (int32_t)r->n, &r->limits, &r->cost, batch,
                           (int32_t)batch_count, group, (int32_t)group_count, sequences, &plan,
                           err) != HCP_OK)
    hcp_py_raise(err);
done:
  PyMem_Free(group);
  PyMem_Free(batch);
  return plan;
}

/* Sums of user-given counts stay below 2^31, so that plan_from can add them. */
static int counts_fit(const int32_t *values, Py_ssize_t n, Py_ssize_t stride, Py_ssize_t offset,
                      Py_ssize_t expected, const char *name) {
  int64_t sum = 0;
  for (Py_ssize_t i = 0; i < n; i++) {
    int32_t count = values[stride * i + offset];
    if (count < 1) {
      PyErr_Format(PyExc_ValueError, "%s[%zd] has %d members, expected >= 1", name, i, (int)count);
      return 0;
    }
    sum += count;
  }
  if (sum == expected) return 1;
  PyErr_Format(PyExc_ValueError, "%s have %lld members, expected %zd", name, (long long)sum,
               expected);
  return 0;
}

static PyObject *plan_create_from(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {REQUEST_KEYWORDS, "micro_batches", "groups", "sequences", NULL};
  PyObject *lengths, *batch_list, *group_list, *sequence_list;
  long long max_tokens, prices[4];
  request r;
  hcp_error err;
  int32_t *batches = NULL, *groups = NULL, *sequences = NULL;
  Py_ssize_t batch_count, group_words, sequence_count;
  hcp_plan *plan = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, REQUEST_FORMAT "OOO:create_plan_from", keywords,
                                   REQUEST_ARGUMENTS(r, lengths), &batch_list, &group_list,
                                   &sequence_list) ||
      request_fill(&r, lengths, max_tokens, prices) < 0)
    return NULL;
  if (hcp_py_int32s(batch_list, "micro_batches", &batches, &batch_count) < 0) goto fail_batches;
  if (hcp_py_int32s(group_list, "groups", &groups, &group_words) < 0) goto fail_groups;
  if (hcp_py_int32s(sequence_list, "sequences", &sequences, &sequence_count) < 0)
    goto fail_sequences;
  if (group_words % 3 != 0)
    PyErr_Format(PyExc_ValueError, "groups has %zd numbers, expected three a group", group_words);
  else if (sequence_count != r.n)
    PyErr_Format(PyExc_ValueError, "the plan has %zd sequences, expected %zd, one per length",
                 sequence_count, r.n);
  else if (counts_fit(batches, batch_count, 1, 0, group_words / 3, "micro_batches") &&
           counts_fit(groups, group_words / 3, 3, 2, sequence_count, "groups"))
    plan = plan_from(&r, batches, batch_count, groups, group_words / 3, sequences, &err);
  PyMem_Free(sequences);
fail_sequences:
  PyMem_Free(groups);
fail_groups:
  PyMem_Free(batches);
fail_batches:
  PyMem_Free(r.lengths);
  return plan == NULL ? NULL : wrap(module, plan);
}

/* ---- attributes ---- */

#define INTEGER_ATTRIBUTES(X)                        \
  X(ranks, limits.ranks)                             \
  X(min_degree, limits.min_degree)                   \
  X(max_degree, limits.max_degree)                   \
  X(max_tokens_per_rank, limits.max_tokens_per_rank) \
  X(pair, cost.pair)                                 \
  X(token, cost.token)                               \
  X(exchange, cost.exchange)                         \
  X(launch, cost.launch)                             \
  X(makespan, makespan)                              \
  X(bound, bound)                                    \
  X(work, work)

#define GETTER(name, field)                                   \
  static PyObject *get_##name(PyObject *self, void *unused) { \
    (void)unused;                                             \
    return PyLong_FromLongLong(plan_of(self)->field);         \
  }
INTEGER_ATTRIBUTES(GETTER)
#undef GETTER

static PyObject *get_checksum(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(plan_of(self)->checksum);
}

static PyObject *export(PyObject *self, const void *data, Py_ssize_t rows, Py_ssize_t width,
                        char format) {
  return hcp_py_view(module_of(self), self, (void *)(uintptr_t)data, rows, width, format, 0);
}

static PyObject *get_lengths(PyObject *self, void *unused) {
  (void)unused;
  return export(self, plan_of(self)->lengths, plan_of(self)->n, 1, 'q');
}

static PyObject *get_micro_batches(PyObject *self, void *unused) {
  (void)unused;
  return export(self, plan_of(self)->micro_batches, plan_of(self)->micro_batch_count, 2, 'i');
}

static PyObject *get_groups(PyObject *self, void *unused) {
  (void)unused;
  return export(self, plan_of(self)->groups, plan_of(self)->group_count, 4, 'i');
}

static PyObject *get_sequences(PyObject *self, void *unused) {
  (void)unused;
  return export(self, plan_of(self)->sequences, plan_of(self)->n, 1, 'i');
}

static PyGetSetDef plan_getset[] = {
#define ATTRIBUTE(name, field) {#name, get_##name, NULL, NULL, NULL},
    INTEGER_ATTRIBUTES(ATTRIBUTE)
#undef ATTRIBUTE
        {"checksum", get_checksum, NULL, "64 bits over everything that the plan says.", NULL},
    {"lengths", get_lengths, NULL, "int64: tokens of each sequence.", NULL},
    {"micro_batches", get_micro_batches, NULL, "int32 rows of (first_group, groups).", NULL},
    {"groups", get_groups, NULL, "int32 rows of (first_rank, degree, first_sequence, sequences).",
     NULL},
    {"sequences", get_sequences, NULL, "int32: indices of lengths, group after group.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

/* ---- tables ---- */

static int comm_type_from(const char *name, hcp_comm_type *comm_type) {
  for (int type = 0; type < HCP_COMM_TYPE_COUNT; type++)
    if (strcmp(hcp_comm_type_name((hcp_comm_type)type), name) == 0) {
      *comm_type = (hcp_comm_type)type;
      return 0;
    }
  PyErr_Format(PyExc_ValueError, "comm_type is '%s', expected one of hcp._core.COMM_TYPES", name);
  return -1;
}

static PyObject *plan_schedule(PyObject *self, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"micro_batch", "rank", "comm_type", "left", "right", NULL};
  int micro_batch, rank;
  long long left, right;
  const char *name;
  hcp_comm_type comm_type;
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iisLL:schedule", keywords, &micro_batch, &rank,
                                   &name, &left, &right) ||
      comm_type_from(name, &comm_type) < 0)
    return NULL;
  const hcp_mask mask = {left, right};
  if (hcp_schedule_create(plan_of(self), micro_batch, rank, comm_type, &mask, &table, &err) !=
      HCP_OK)
    return hcp_py_raise(&err);
  return hcp_py_table(module_of(self), table);
}

static PyObject *plan_route_dispatch(PyObject *self, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"sources", "rank", "first", "count", "reverse", NULL};
  PyObject *source_list;
  int rank, first, count, reverse;
  int32_t *sources;
  Py_ssize_t n;
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oiiip:route_dispatch", keywords, &source_list,
                                   &rank, &first, &count, &reverse) ||
      hcp_py_int32s(source_list, "sources", &sources, &n) < 0)
    return NULL;
  if (n != plan_of(self)->n) {
    PyErr_Format(PyExc_ValueError, "sources has %zd items, expected %d, one per sequence", n,
                 (int)plan_of(self)->n);
    PyMem_Free(sources);
    return NULL;
  }
  hcp_status status =
      hcp_route_dispatch(plan_of(self), sources, rank, first, count, reverse, &table, &err);
  PyMem_Free(sources);
  return status == HCP_OK ? hcp_py_table(module_of(self), table) : hcp_py_raise(&err);
}

static PyObject *plan_route_roll(PyObject *self, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"micro_batch", "rank", "shift", NULL};
  int micro_batch, rank;
  long long shift;
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiL:route_roll", keywords, &micro_batch, &rank,
                                   &shift))
    return NULL;
  if (hcp_route_roll(plan_of(self), micro_batch, rank, shift, &table, &err) != HCP_OK)
    return hcp_py_raise(&err);
  return hcp_py_table(module_of(self), table);
}

static PyMethodDef plan_methods[] = {
    {"schedule", (PyCFunction)(void (*)(void))plan_schedule, METH_VARARGS | METH_KEYWORDS,
     "The steps of one attention layer on one rank, as words of a table."},
    {"route_dispatch", (PyCFunction)(void (*)(void))plan_route_dispatch,
     METH_VARARGS | METH_KEYWORDS,
     "Rows from the ranks that loaded them to the ranks that compute them, or back."},
    {"route_roll", (PyCFunction)(void (*)(void))plan_route_roll, METH_VARARGS | METH_KEYWORDS,
     "Rows of a micro-batch shifted along their sequences."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot plan_slots[] = {{Py_tp_dealloc, HCP_PY_SLOT(plan_dealloc)},
                                   {Py_tp_getset, plan_getset},
                                   {Py_tp_methods, plan_methods},
                                   {Py_tp_doc, "Who computes what, with how many ranks."},
                                   {0, NULL}};

static PyType_Spec plan_spec = {"hcp._core.Plan", sizeof(plan_object), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, plan_slots};

static PyMethodDef functions[] = {
    {"create_plan", (PyCFunction)(void (*)(void))plan_create, METH_VARARGS | METH_KEYWORDS,
     "Assign sequences to ranks."},
    {"create_plan_from", (PyCFunction)(void (*)(void))plan_create_from,
     METH_VARARGS | METH_KEYWORDS, "A plan from groups that somebody else chose, checked."},
    {NULL, NULL, 0, NULL}};

int hcp_py_add_plan(PyObject *module) {
  if (hcp_py_add_type(module, "Plan", &plan_spec) < 0) return -1;
  return PyModule_AddFunctions(module, functions);
}
