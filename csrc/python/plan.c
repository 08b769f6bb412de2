/* plan.c - Plan: an immutable value, and the tables that follow from it. */
#include <string.h>

#include "request.h"

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
  PyErr_Format(PyExc_TypeError, "plan is %R, expected a Plan of hcp._core", object);
  return NULL;
}

/* ---- creation ---- */

#define PRICE_NAME(name) #name,
static const char *const price_names[PRICE_COUNT] = {HCP_PRICES(PRICE_NAME)};
#undef PRICE_NAME

#define NUMBER_NAME(type, field, name) #name,
static const char *const limit_names[LIMIT_COUNT] = {HCP_LIMITS(NUMBER_NAME)};
#undef NUMBER_NAME

#define LIST_NAME(name, count) #name,
static const char *const list_names[LIMIT_LIST_COUNT] = {HCP_LIMIT_LISTS(LIST_NAME)};
#undef LIST_NAME

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
  static char *keywords[] = {REQUEST_KEYWORDS, "effort", NULL};
  PyObject *lengths, *limits, *lists, *prices, *cost_table, *pairs, *effort_object;
  int32_t effort;
  request r;
  hcp_plan *plan = NULL;
  hcp_py_gil gil;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, REQUEST_FORMAT "O:create_plan", keywords, &lengths,
                                   &limits, &lists, &prices, &cost_table, &pairs, &effort_object) ||
      hcp_py_int32(effort_object, "effort", &effort) < 0 ||
      hcp_py_request_fill(&r, lengths, limits, lists, prices, cost_table, pairs) < 0)
    return NULL;
  hcp_py_request_search(&r, &gil);
  hcp_status status =
      hcp_plan_create(r.lengths, (int32_t)r.n, &r.limits, &r.cost, effort, &gil.stop, &plan, &err);
  int raised = hcp_py_take_gil(&gil);
  hcp_py_request_release(&r);
  if (raised) hcp_plan_destroy(plan);
  if (raised) return NULL;
  return status == HCP_OK ? wrap(module, plan) : hcp_py_raise(&err);
}

static PyObject *plan_bound(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {REQUEST_KEYWORDS, "effort", NULL};
  PyObject *lengths, *limits, *lists, *prices, *cost_table, *pairs, *effort_object;
  int32_t effort;
  request r;
  int64_t bound = 0, work = 0;
  hcp_py_gil gil;
  hcp_error err;
  (void)module;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, REQUEST_FORMAT "O:plan_bound", keywords, &lengths,
                                   &limits, &lists, &prices, &cost_table, &pairs, &effort_object) ||
      hcp_py_int32(effort_object, "effort", &effort) < 0 ||
      hcp_py_request_fill(&r, lengths, limits, lists, prices, cost_table, pairs) < 0)
    return NULL;
  hcp_py_request_search(&r, &gil);
  hcp_status status = hcp_plan_bound(r.lengths, (int32_t)r.n, &r.limits, &r.cost, effort, &gil.stop,
                                     &bound, &work, &err);
  int raised = hcp_py_take_gil(&gil);
  hcp_py_request_release(&r);
  if (raised) return NULL;
  return status == HCP_OK ? Py_BuildValue("LL", (long long)bound, (long long)work)
                          : hcp_py_raise(&err);
}

static PyObject *pipeline_time(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"times", "stages", "virtual_stages", "group", NULL};
  PyObject *list, *stages, *virtual_stages, *group;
  hcp_pipeline pipeline = {0};
  int64_t *times, makespan = 0;
  Py_ssize_t n;
  hcp_error err;
  (void)module;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO:pipeline_time", keywords, &list, &stages,
                                   &virtual_stages, &group) ||
      hcp_py_int32(stages, "stages", &pipeline.stages) < 0 ||
      hcp_py_int32(virtual_stages, "virtual_stages", &pipeline.virtual_stages) < 0 ||
      hcp_py_int32(group, "group", &pipeline.micro_batch_group) < 0 ||
      hcp_py_int64s(list, "times", &times, &n) < 0)
    return NULL;
  HCP_PY_WITHOUT_GIL(NULL, status,
                     hcp_pipeline_time(&pipeline, times, (int32_t)n, &makespan, &err));
  PyMem_Free(times);
  return status == HCP_OK ? PyLong_FromLongLong(makespan) : hcp_py_raise(&err);
}

static PyObject *cost_time(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"prices",         "table", "length", "degree",
                             "ranks_per_node", "pairs", NULL};
  PyObject *prices, *cost_table, *length_object, *degree_object, *node_object, *pairs_object;
  int64_t length, pairs;
  int32_t degree, node;
  request r = {0};
  int64_t time = 0;
  hcp_error err;
  (void)module;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOO:cost_time", keywords, &prices, &cost_table,
                                   &length_object, &degree_object, &node_object, &pairs_object) ||
      hcp_py_int64(length_object, "length", &length) < 0 ||
      hcp_py_int32(degree_object, "degree", &degree) < 0 ||
      hcp_py_int32(node_object, "ranks_per_node", &node) < 0 ||
      hcp_py_int64(pairs_object, "pairs", &pairs) < 0)
    return NULL;
  int filled = hcp_py_fill_prices(&r.cost, prices) == 0 &&
               hcp_py_fill_cost_table(&r, cost_table) == 0 && hcp_py_request_expect_times(&r) == 0;
  hcp_status status =
      filled ? hcp_cost_time(&r.cost, length, pairs, degree, node, &time, &err) : HCP_CALLBACK;
  hcp_py_request_release(&r);
  if (!filled) return NULL;
  return status == HCP_OK ? PyLong_FromLongLong(time) : hcp_py_raise(&err);
}

static PyObject *function_time(PyObject *module, PyObject *args) {
  PyObject *function, *length_object, *degree_object;
  double unit;
  int64_t length;
  int32_t degree;
  (void)module;
  if (!PyArg_ParseTuple(args, "OdOO:function_time", &function, &unit, &length_object,
                        &degree_object) ||
      hcp_py_int64(length_object, "length", &length) < 0 ||
      hcp_py_int32(degree_object, "degree", &degree) < 0)
    return NULL;
  int64_t units = hcp_py_units(function, unit, length, degree);
  return units < 0 ? NULL : PyLong_FromLongLong(units);
}

/* ---- masks ---- */

/* firsts: where the records of each of n sequences begin, and where the last ends. */
static int ascends(const int64_t *firsts, Py_ssize_t n, int32_t sequences, Py_ssize_t records) {
  int fits = n == (Py_ssize_t)sequences + 1 && firsts[0] == 0 && firsts[n - 1] == records;
  for (Py_ssize_t i = 1; fits && i < n; i++) fits = firsts[i] >= firsts[i - 1];
  if (!fits)
    PyErr_Format(PyExc_ValueError, "a mask's firsts have %zd items, expected %d from 0 up to %zd",
                 n, (int)sequences + 1, records);
  return fits;
}

/* Records of so many words, of each sequence, of items i and i + 1 of a mask: arrays that the
 * caller frees, whatever is returned. */
static int fill_records(PyObject *mask, Py_ssize_t i, Py_ssize_t width, int32_t sequences,
                        const int64_t **firsts, const int64_t **words) {
  int64_t *own_firsts, *own_words;
  Py_ssize_t n, count;
  if (hcp_py_int64s(PyTuple_GetItem(mask, i), "firsts", &own_firsts, &n) < 0) return -1;
  *firsts = own_firsts;
  if (hcp_py_int64s(PyTuple_GetItem(mask, i + 1), "words", &own_words, &count) < 0) return -1;
  *words = own_words;
  if (count % width != 0) {
    PyErr_Format(PyExc_ValueError, "a mask has %zd words, expected a multiple of %zd", count,
                 width);
    return -1;
  }
  return ascends(own_firsts, n, sequences, count / width) ? 0 : -1;
}

/* A mask of a tuple (firsts, words of the slices, firsts, words of the runs of positions). */
static int fill_masks(hcp_masks *masks, PyObject *mask, int32_t sequences) {
  const int64_t *slices = NULL, *runs = NULL;
  if (!PyTuple_Check(mask) || PyTuple_Size(mask) != 4) {
    PyErr_Format(PyExc_TypeError, "a mask is %R, expected a tuple of firsts and words, twice",
                 mask);
    return -1;
  }
  int filled = fill_records(mask, 0, 6, sequences, &masks->first, &slices);
  if (filled == 0) filled = fill_records(mask, 2, 2, sequences, &masks->first_run, &runs);
  masks->slices = (const hcp_slice *)slices;
  masks->runs = (const hcp_position_run *)runs;
  return filled;
}

static void free_masks(hcp_masks *masks, Py_ssize_t count) {
  for (Py_ssize_t m = 0; m < count; m++) {
    PyMem_Free((void *)(uintptr_t)masks[m].first);
    PyMem_Free((void *)(uintptr_t)masks[m].slices);
    PyMem_Free((void *)(uintptr_t)masks[m].first_run);
    PyMem_Free((void *)(uintptr_t)masks[m].runs);
  }
  PyMem_Free(masks);
}

static PyObject *plan_set_masks(PyObject *self, PyObject *list) {
  hcp_plan *plan = ((plan_object *)self)->plan;
  Py_ssize_t count = PySequence_Size(list);
  hcp_status status = HCP_CALLBACK;
  hcp_error err = {HCP_CALLBACK, ""};
  hcp_py_gil gil;
  if (count < 0) return NULL;
  if (count > INT32_MAX)
    return PyErr_Format(PyExc_ValueError, "there are %zd masks, expected < 2^31", count);
  hcp_masks *masks = PyMem_Calloc((size_t)count + 1, sizeof *masks);
  if (masks == NULL) return PyErr_NoMemory();
  int filled = 1;
  for (Py_ssize_t m = 0; filled && m < count; m++) {
    PyObject *mask = PySequence_GetItem(list, m);
    filled = mask != NULL && fill_masks(&masks[m], mask, plan->n) == 0;
    Py_XDECREF(mask);
  }
  if (filled) {
    hcp_py_drop_gil(&gil, self);
    status = hcp_plan_set_masks(plan, masks, (int32_t)count, &err);
    hcp_py_take_gil(&gil);
  }
  free_masks(masks, count);
  if (!filled) return NULL;
  return status == HCP_OK ? Py_NewRef(Py_None) : hcp_py_raise(&err);
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
  for (Py_ssize_t m = 0; m < batch_count; m++) {
    batch[m] = (hcp_micro_batch){first_group, batches[m]};
    first_group += batches[m];
  }
  for (Py_ssize_t g = 0; g < group_count; g++) {
    const int32_t *given = &groups[3 * g];
    group[g] = (hcp_group){given[0], given[1], first_sequence, given[2]};
    first_sequence += given[2];
  }
  HCP_PY_WITHOUT_GIL(NULL, status,
                     hcp_plan_create_from(r->lengths, (int32_t)r->n, &r->limits, &r->cost, batch,
                                          (int32_t)batch_count, group, (int32_t)group_count,
                                          sequences, &plan, err));
  if (status != HCP_OK) hcp_py_raise(err);
done:
  PyMem_Free(group);
  PyMem_Free(batch);
  return plan;
}

/* Sums of user-given counts stay below 2^31, so that plan_from can add them. */
static int counts_fit(const int32_t *values, Py_ssize_t n, Py_ssize_t stride, Py_ssize_t offset,
                      int32_t least, Py_ssize_t expected, const char *name) {
  int64_t sum = 0;
  for (Py_ssize_t i = 0; i < n; i++) {
    int32_t count = values[stride * i + offset];
    if (count < least) {
      PyErr_Format(PyExc_ValueError, "%s[%zd] has %d members, expected >= %d", name, i, (int)count,
                   (int)least);
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
  PyObject *lengths, *limits, *lists, *prices, *cost_table, *pairs, *batch_list, *group_list,
      *sequence_list;
  request r;
  hcp_error err;
  int32_t *batches = NULL, *groups = NULL, *sequences = NULL;
  Py_ssize_t batch_count, group_words, sequence_count;
  hcp_plan *plan = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, REQUEST_FORMAT "OOO:create_plan_from", keywords,
                                   &lengths, &limits, &lists, &prices, &cost_table, &pairs,
                                   &batch_list, &group_list, &sequence_list) ||
      hcp_py_request_fill(&r, lengths, limits, lists, prices, cost_table, pairs) < 0)
    return NULL;
  if (hcp_py_request_expect_times(&r) < 0 ||
      hcp_py_int32s(batch_list, "micro_batches", &batches, &batch_count) < 0)
    goto fail_batches;
  if (hcp_py_int32s(group_list, "groups", &groups, &group_words) < 0) goto fail_groups;
  if (hcp_py_int32s(sequence_list, "sequences", &sequences, &sequence_count) < 0)
    goto fail_sequences;
  if (group_words % 3 != 0)
    PyErr_Format(PyExc_ValueError, "groups has %zd numbers, expected three a group", group_words);
  else if (sequence_count != r.n)
    PyErr_Format(PyExc_ValueError, "the plan has %zd sequences, expected %zd, one per length",
                 sequence_count, r.n);
  else if (counts_fit(batches, batch_count, 1, 0, 0, group_words / 3, "micro_batches") &&
           counts_fit(groups, group_words / 3, 3, 2, 1, sequence_count, "groups"))
    plan = plan_from(&r, batches, batch_count, groups, group_words / 3, sequences, &err);
  PyMem_Free(sequences);
fail_sequences:
  PyMem_Free(groups);
fail_groups:
  PyMem_Free(batches);
fail_batches:
  hcp_py_request_release(&r);
  return plan == NULL ? NULL : wrap(module, plan);
}

/* ---- attributes ---- */

#define GETTER(type, field, name)                             \
  static PyObject *get_##name(PyObject *self, void *unused) { \
    (void)unused;                                             \
    return PyLong_FromLongLong(plan_of(self)->field);         \
  }
HCP_DOMAIN_LIMITS(GETTER, limits.)
HCP_PIPELINE_LIMITS(GETTER, limits.pipeline.)
GETTER(int64_t, makespan, makespan)
GETTER(int64_t, bound, bound)
GETTER(int64_t, work, work)
#undef GETTER

static PyObject *get_memory(PyObject *self, void *unused) {
  (void)unused;
#define BYTES(type, field, name) plan_of(self)->field,
  const int64_t bytes[] = {HCP_MEMORY_LIMITS(BYTES, limits.memory.)};
#undef BYTES
  return hcp_py_tuple(bytes, sizeof bytes / sizeof *bytes);
}

static PyObject *get_prices(PyObject *self, void *unused) {
  (void)unused;
  const hcp_cost *cost = &plan_of(self)->cost;
#define PRICE(name) cost->name,
  const int64_t prices[] = {HCP_PRICES(PRICE)};
#undef PRICE
  return hcp_py_tuple(prices, PRICE_COUNT);
}

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

/* None where the cost's window says them. */
static PyObject *get_pairs(PyObject *self, void *unused) {
  (void)unused;
  const int64_t *pairs = plan_of(self)->cost.pairs;
  return pairs == NULL ? Py_NewRef(Py_None) : export(self, pairs, plan_of(self)->n, 1, 'q');
}

static PyObject *export_list(PyObject *self, const int32_t *values, Py_ssize_t n) {
  return values == NULL ? Py_NewRef(Py_None) : export(self, values, n, 1, 'i');
}

#define GETTER(name, count)                                   \
  static PyObject *get_##name(PyObject *self, void *unused) { \
    const hcp_limits *limits = &plan_of(self)->limits;        \
    Py_ssize_t n = plan_of(self)->n;                          \
    (void)unused, (void)n;                                    \
    return export_list(self, limits->name, count);            \
  }
HCP_LIMIT_LISTS(GETTER)
#undef GETTER

/* Lengths, degrees and times of the cost table, None without one. */
static PyObject *get_cost_table(PyObject *self, void *unused) {
  (void)unused;
  const hcp_times *times = plan_of(self)->cost.times;
  if (times == NULL) return Py_NewRef(Py_None);
  Py_ssize_t rows = times->length_count, columns = times->degree_count;
  PyObject *lengths = export(self, times->lengths, rows, 1, 'q');
  PyObject *degrees = export(self, times->degrees, columns, 1, 'i');
  PyObject *values = export(self, times->times, rows * columns, 1, 'q');
  if (lengths != NULL && degrees != NULL && values != NULL)
    return Py_BuildValue("NNN", lengths, degrees, values);
  Py_XDECREF(lengths);
  Py_XDECREF(degrees);
  Py_XDECREF(values);
  return NULL;
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
#define NUMBER(type, field, name) {#name, get_##name, NULL, NULL, NULL},
    HCP_DOMAIN_LIMITS(NUMBER, ) HCP_PIPELINE_LIMITS(NUMBER, )
#undef NUMBER
#define LIST(name, count) {#name, get_##name, NULL, "int32, or None.", NULL},
        HCP_LIMIT_LISTS(LIST)
#undef LIST
            {"makespan", get_makespan, NULL, NULL, NULL},
    {"bound", get_bound, NULL, NULL, NULL},
    {"work", get_work, NULL, NULL, NULL},
    {"memory", get_memory, NULL, "Bytes, in the order of hcp_memory.", NULL},
    {"prices", get_prices, NULL, "The cost's integers, in the order of PRICES.", NULL},
    {"checksum", get_checksum, NULL, "64 bits over everything that the plan says.", NULL},
    {"lengths", get_lengths, NULL, "int64: tokens of each sequence.", NULL},
    {"pairs", get_pairs, NULL, "int64: pairs of each sequence, or None.", NULL},
    {"table", get_cost_table, NULL, "(lengths, degrees, times) of the cost's table, or None.",
     NULL},
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
  PyErr_Format(PyExc_ValueError, "comm_type is '%s', expected one of %s", name,
               &(HCP_COMM_TYPES(HCP_PY_LISTED))[2]);
  return -1;
}

static PyObject *table_or_raise(PyObject *self, hcp_status status, hcp_table *table,
                                const hcp_error *err) {
  return status == HCP_OK ? hcp_py_table(module_of(self), table) : hcp_py_raise(err);
}

/* A micro-batch and a rank. */
static int place_from(PyObject *const objects[2], int32_t *micro_batch, int32_t *rank) {
  if (hcp_py_int32(objects[0], "micro_batch", micro_batch) < 0) return -1;
  return hcp_py_int32(objects[1], "rank", rank);
}

/* What the caller says in the header of a schedule: it has defaults. */
static int header_from(PyObject *const objects[5], hcp_schedule_header *header) {
  static const char *const names[] = {"serial", "transport", "step", "head_chunks"};
  int64_t *const values[] = {&header->serial, &header->transport, &header->step,
                             &header->head_chunks};
  for (int i = 0; i < 4; i++)
    if (objects[i] != NULL && hcp_py_int64(objects[i], names[i], values[i]) < 0) return -1;
  if (objects[4] == NULL) return 0;
  header->plan = (int64_t)PyLong_AsUnsignedLongLong(objects[4]);
  return header->plan == -1 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *plan_schedule(PyObject *self, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"micro_batch", "rank",     "comm_type",    "inner",
                             "left",        "right",    "stage_tokens", "mask",
                             "by_nodes",    "serial",   "transport",    "step",
                             "head_chunks", "checksum", "in_place",     NULL};
  PyObject *place[2], *inner_object, *sides[2], *stage_tokens_object, *index_object = NULL;
  PyObject *said[5] = {NULL, NULL, NULL, NULL, NULL};
  int by_nodes = 0, in_place = 0;
  const hcp_plan *plan = plan_of(self);
  hcp_schedule_header header = {.plan = (int64_t)plan->checksum, .head_chunks = 1};
  int32_t micro_batch, rank, inner;
  int64_t stage_tokens;
  hcp_mask mask = {.index = -1};
  const char *name;
  hcp_comm_type comm_type;
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOsOOOO|OpOOOOOp:schedule", keywords, &place[0],
                                   &place[1], &name, &inner_object, &sides[0], &sides[1],
                                   &stage_tokens_object, &index_object, &by_nodes, &said[0],
                                   &said[1], &said[2], &said[3], &said[4], &in_place) ||
      header_from(said, &header) < 0 || place_from(place, &micro_batch, &rank) < 0 ||
      comm_type_from(name, &comm_type) < 0 || hcp_py_int32(inner_object, "inner", &inner) < 0 ||
      hcp_py_int64(sides[0], "left", &mask.left) < 0 ||
      hcp_py_int64(sides[1], "right", &mask.right) < 0 ||
      hcp_py_int64(stage_tokens_object, "stage_tokens", &stage_tokens) < 0 ||
      (index_object != NULL && hcp_py_int32(index_object, "mask", &mask.index) < 0))
    return NULL;
  HCP_PY_WITHOUT_GIL(self, status,
                     hcp_schedule_create(plan, micro_batch, rank, comm_type, inner, &mask,
                                         stage_tokens, by_nodes, in_place, &table, &err));
  if (status != HCP_OK) return hcp_py_raise(&err);
  header.micro_batch = micro_batch;
  header.rank = rank;
  header.mask = mask.index;
  header.in_place = in_place;
  hcp_schedule_set_header(table, &header);
  return hcp_py_table(module_of(self), table);
}

/* The rank that loaded each sequence; the caller frees it. */
static int sources_from(PyObject *self, PyObject *list, int32_t **sources) {
  Py_ssize_t n;
  if (hcp_py_int32s(list, "sources", sources, &n) < 0) return -1;
  if (n == plan_of(self)->n) return 0;
  PyErr_Format(PyExc_ValueError, "sources has %zd items, expected %d, one per sequence", n,
               (int)plan_of(self)->n);
  PyMem_Free(*sources);
  return -1;
}

static PyObject *plan_route_dispatch(PyObject *self, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"sources", "rank", "first", "count", "reverse", NULL};
  PyObject *source_list, *rank_object, *first_object, *count_object;
  int32_t rank, first, count;
  int reverse;
  int32_t *sources;
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOp:route_dispatch", keywords, &source_list,
                                   &rank_object, &first_object, &count_object, &reverse) ||
      hcp_py_int32(rank_object, "rank", &rank) < 0 ||
      hcp_py_int32(first_object, "first", &first) < 0 ||
      hcp_py_int32(count_object, "count", &count) < 0 ||
      sources_from(self, source_list, &sources) < 0)
    return NULL;
  HCP_PY_WITHOUT_GIL(
      self, status,
      hcp_route_dispatch(plan_of(self), sources, rank, first, count, reverse, &table, &err));
  PyMem_Free(sources);
  return table_or_raise(self, status, table, &err);
}

static PyObject *plan_route_by_sequence(PyObject *self, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"sources", "micro_batch", "rank", NULL};
  PyObject *source_list, *place[2];
  int32_t micro_batch, rank, *sources;
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO:route_by_sequence", keywords, &source_list,
                                   &place[0], &place[1]) ||
      place_from(place, &micro_batch, &rank) < 0 || sources_from(self, source_list, &sources) < 0)
    return NULL;
  HCP_PY_WITHOUT_GIL(
      self, status, hcp_route_by_sequence(plan_of(self), sources, micro_batch, rank, &table, &err));
  PyMem_Free(sources);
  return table_or_raise(self, status, table, &err);
}

static PyObject *plan_payload(PyObject *self, PyObject *args, PyObject *kwargs) {
  return hcp_py_payload(module_of(self), self, args, kwargs);
}

/* Four integers. */
static int capacity_from(PyObject *const objects[4], hcp_capacity *capacity) {
  if (hcp_py_int64(objects[0], "rows", &capacity->rows) < 0 ||
      hcp_py_int64(objects[1], "sequences", &capacity->sequences) < 0 ||
      hcp_py_int64(objects[2], "max_seqlen", &capacity->max_seqlen) < 0)
    return -1;
  return hcp_py_int32(objects[3], "ranks", &capacity->ranks);
}

static PyObject *plan_fixed(PyObject *self, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"micro_batch", "rank",  "rows", "sequences",
                             "max_seqlen",  "ranks", NULL};
  PyObject *place[2], *numbers[4];
  int32_t micro_batch, rank;
  hcp_capacity capacity;
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOO:fixed", keywords, &place[0], &place[1],
                                   &numbers[0], &numbers[1], &numbers[2], &numbers[3]) ||
      place_from(place, &micro_batch, &rank) < 0 || capacity_from(numbers, &capacity) < 0)
    return NULL;
  HCP_PY_WITHOUT_GIL(self, status,
                     hcp_fixed_create(plan_of(self), micro_batch, rank, &capacity, &table, &err));
  return table_or_raise(self, status, table, &err);
}

static PyObject *fixed_sizes(PyObject *module, PyObject *args) {
  PyObject *numbers[4];
  int64_t sizes[HCP_FIXED_SECTION_COUNT];
  hcp_capacity capacity;
  hcp_error err;
  (void)module;
  if (!PyArg_ParseTuple(args, "OOOO:fixed_sizes", &numbers[0], &numbers[1], &numbers[2],
                        &numbers[3]) ||
      capacity_from(numbers, &capacity) < 0)
    return NULL;
  if (hcp_fixed_sizes(&capacity, sizes, &err) != HCP_OK) return hcp_py_raise(&err);
  return hcp_py_tuple(sizes, HCP_FIXED_SECTION_COUNT);
}

static PyObject *plan_route_roll(PyObject *self, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"micro_batch", "rank", "shift", NULL};
  PyObject *place[2], *shift_object;
  int32_t micro_batch, rank;
  int64_t shift;
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO:route_roll", keywords, &place[0], &place[1],
                                   &shift_object) ||
      place_from(place, &micro_batch, &rank) < 0 || hcp_py_int64(shift_object, "shift", &shift) < 0)
    return NULL;
  HCP_PY_WITHOUT_GIL(self, status,
                     hcp_route_roll(plan_of(self), micro_batch, rank, shift, &table, &err));
  return table_or_raise(self, status, table, &err);
}

static PyObject *plan_route_halo(PyObject *self, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"micro_batch", "rank", "before", NULL};
  PyObject *place[2], *before_object;
  int32_t micro_batch, rank;
  int64_t before;
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO:route_halo", keywords, &place[0], &place[1],
                                   &before_object) ||
      place_from(place, &micro_batch, &rank) < 0 ||
      hcp_py_int64(before_object, "before", &before) < 0)
    return NULL;
  HCP_PY_WITHOUT_GIL(self, status,
                     hcp_route_halo(plan_of(self), micro_batch, rank, before, &table, &err));
  return table_or_raise(self, status, table, &err);
}

static PyObject *plan_states(PyObject *self, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"micro_batch", "rank", "by_rounds", NULL};
  PyObject *place[2];
  int32_t micro_batch, rank;
  int by_rounds;
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOp:states", keywords, &place[0], &place[1],
                                   &by_rounds) ||
      place_from(place, &micro_batch, &rank) < 0)
    return NULL;
  HCP_PY_WITHOUT_GIL(self, status,
                     hcp_states_create(plan_of(self), micro_batch, rank, by_rounds, &table, &err));
  return table_or_raise(self, status, table, &err);
}

static PyObject *plan_states_rows(PyObject *self, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"micro_batch", "rank", NULL};
  PyObject *place[2];
  int32_t micro_batch, rank;
  hcp_states_rows rows;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:states_rows", keywords, &place[0],
                                   &place[1]) ||
      place_from(place, &micro_batch, &rank) < 0)
    return NULL;
  HCP_PY_WITHOUT_GIL(self, status,
                     hcp_states_measure(plan_of(self), micro_batch, rank, &rows, &err));
  if (status != HCP_OK) return hcp_py_raise(&err);
  return Py_BuildValue("(LLi)", (long long)rows.gathered, (long long)rows.by_rounds,
                       (int)rows.rounds);
}

/* (micro_batch, rank, state_bytes, round_bytes) */
static PyObject *plan_states_by_rounds(PyObject *self, PyObject *args) {
  PyObject *place[2], *sizes[2];
  int32_t micro_batch, rank, by_rounds;
  int64_t state_bytes, round_bytes;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "OOOO:states_by_rounds", &place[0], &place[1], &sizes[0],
                        &sizes[1]) ||
      place_from(place, &micro_batch, &rank) < 0 ||
      hcp_py_int64(sizes[0], "state_bytes", &state_bytes) < 0 ||
      hcp_py_int64(sizes[1], "round_bytes", &round_bytes) < 0)
    return NULL;
  HCP_PY_WITHOUT_GIL(self, status,
                     hcp_states_choose(plan_of(self), micro_batch, rank, state_bytes, round_bytes,
                                       &by_rounds, &err));
  return status == HCP_OK ? PyBool_FromLong(by_rounds) : hcp_py_raise(&err);
}

/* (micro_batch, rank, row_bytes, state_bytes, row_work, round_bytes, exchanges) */
static PyObject *plan_scan_price(PyObject *self, PyObject *args) {
  PyObject *place[2], *sizes[4], *exchanges;
  int32_t micro_batch, rank;
  hcp_scanned layer;
  hcp_scan_costs costs;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "OOOOOOO:scan_price", &place[0], &place[1], &sizes[0], &sizes[1],
                        &sizes[2], &sizes[3], &exchanges) ||
      place_from(place, &micro_batch, &rank) < 0 ||
      hcp_py_int64(sizes[0], "row_bytes", &layer.row_bytes) < 0 ||
      hcp_py_int64(sizes[1], "state_bytes", &layer.state_bytes) < 0 ||
      hcp_py_int64(sizes[2], "row_work", &layer.row_work) < 0 ||
      hcp_py_int64(sizes[3], "round_bytes", &layer.round_bytes) < 0 ||
      hcp_py_int32(exchanges, "exchanges", &layer.exchanges) < 0)
    return NULL;
  HCP_PY_WITHOUT_GIL(self, status,
                     hcp_scan_price(plan_of(self), micro_batch, rank, &layer, &costs, &err));
  if (status != HCP_OK) return hcp_py_raise(&err);
  return Py_BuildValue("(LL)", (long long)costs.states, (long long)costs.heads);
}

static PyObject *plan_cross(PyObject *self, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"micro_batch", "rank",  "keys", "keys_micro_batch",
                             "left",        "right", NULL};
  PyObject *place[2], *keys_object, *keys_batch, *sides[2];
  hcp_cross_side queries = {.plan = plan_of(self)}, keys;
  int32_t rank;
  int64_t left, right;
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOO:cross", keywords, &place[0], &place[1],
                                   &keys_object, &keys_batch, &sides[0], &sides[1]) ||
      place_from(place, &queries.micro_batch, &rank) < 0)
    return NULL;
  keys.plan = hcp_py_plan(module_of(self), keys_object);
  if (keys.plan == NULL || hcp_py_int32(keys_batch, "keys_micro_batch", &keys.micro_batch) < 0 ||
      hcp_py_int64(sides[0], "left", &left) < 0 || hcp_py_int64(sides[1], "right", &right) < 0)
    return NULL;
  HCP_PY_WITHOUT_GIL(self, status,
                     hcp_cross_create(&queries, &keys, rank, left, right, &table, &err));
  return table_or_raise(self, status, table, &err);
}

static PyObject *plan_expect_no_branches(PyObject *self, PyObject *operation) {
  hcp_error err;
  const char *text = PyUnicode_AsUTF8AndSize(operation, NULL);
  if (text == NULL) return NULL;
  hcp_status status = hcp_plan_expect_no_branches(plan_of(self), text, &err);
  return status == HCP_OK ? Py_NewRef(Py_None) : hcp_py_raise(&err);
}

static PyObject *plan_expect_trees(PyObject *self, PyObject *operation) {
  hcp_error err;
  const char *text = PyUnicode_AsUTF8AndSize(operation, NULL);
  if (text == NULL) return NULL;
  hcp_status status = hcp_plan_expect_trees(plan_of(self), text, &err);
  return status == HCP_OK ? Py_NewRef(Py_None) : hcp_py_raise(&err);
}

static PyObject *plan_has_branches(PyObject *self, PyObject *unused) {
  (void)unused;
  return PyBool_FromLong(hcp_plan_expect_no_branches(plan_of(self), "", NULL) != HCP_OK);
}

static PyMethodDef plan_methods[] = {
    {"set_masks", (PyCFunction)plan_set_masks, METH_O,
     "Give the plan masks, as the last step of its creation: (firsts, words) of slices and of "
     "runs."},
    {"expect_no_branches", (PyCFunction)plan_expect_no_branches, METH_O,
     "Raise ValueError, for an operation by name, where a sequence's mask has branches."},
    {"has_branches", (PyCFunction)plan_has_branches, METH_NOARGS,
     "Whether a sequence's mask has branches."},
    {"expect_trees", (PyCFunction)plan_expect_trees, METH_O,
     "Raise ValueError, for an operation by name, where a branch has no one parent."},
    {"schedule", (PyCFunction)(void (*)(void))plan_schedule, METH_VARARGS | METH_KEYWORDS,
     "The steps of one attention layer on one rank, as words of a table."},
    {"route_dispatch", (PyCFunction)(void (*)(void))plan_route_dispatch,
     METH_VARARGS | METH_KEYWORDS,
     "Rows from the ranks that loaded them to the ranks that compute them, or back."},
    {"route_by_sequence", (PyCFunction)(void (*)(void))plan_route_by_sequence,
     METH_VARARGS | METH_KEYWORDS,
     "A row of each sequence from its group's first rank to the rank that loaded it."},
    {"payload", (PyCFunction)(void (*)(void))plan_payload, METH_VARARGS | METH_KEYWORDS,
     "A Payload: rows of all sequences, and how groups split them."},
    {"fixed", (PyCFunction)(void (*)(void))plan_fixed, METH_VARARGS | METH_KEYWORDS,
     "The tables of fixed sizes of one rank."},
    {"route_roll", (PyCFunction)(void (*)(void))plan_route_roll, METH_VARARGS | METH_KEYWORDS,
     "Rows of a micro-batch shifted along their sequences."},
    {"route_halo", (PyCFunction)(void (*)(void))plan_route_halo, METH_VARARGS | METH_KEYWORDS,
     "Each span of a micro-batch, after the rows that come before it in its sequence."},
    {"states", (PyCFunction)(void (*)(void))plan_states, METH_VARARGS | METH_KEYWORDS,
     "How states of a micro-batch get from rank to rank, as words of a table."},
    {"states_rows", (PyCFunction)(void (*)(void))plan_states_rows, METH_VARARGS | METH_KEYWORDS,
     "(gathered, by_rounds, rounds): rows that the busiest rank gets from others."},
    {"states_by_rounds", plan_states_by_rounds, METH_VARARGS,
     "Whether states of so many bytes cost less by rounds than gathered."},
    {"scan_price", plan_scan_price, METH_VARARGS,
     "(states, heads): what a recurrent layer costs the busiest rank where states travel, and "
     "where rows do, in bytes."},
    {"cross", (PyCFunction)(void (*)(void))plan_cross, METH_VARARGS | METH_KEYWORDS,
     "Keys of another plan's micro-batch for the queries of this one's, as words of a table."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot plan_slots[] = {{Py_tp_dealloc, HCP_PY_SLOT(plan_dealloc)},
                                   {Py_tp_getset, plan_getset},
                                   {Py_tp_methods, plan_methods},
                                   {Py_tp_doc, "Who computes what, with how many ranks."},
                                   {0, NULL}};

static PyType_Spec plan_spec = {
    "hcp._core.Plan", sizeof(plan_object), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, plan_slots};

static PyMethodDef functions[] = {
    {"create_plan", (PyCFunction)(void (*)(void))plan_create, METH_VARARGS | METH_KEYWORDS,
     "Assign sequences to ranks."},
    {"cost_time", (PyCFunction)(void (*)(void))cost_time, METH_VARARGS | METH_KEYWORDS,
     "Time of one sequence at a degree, without launch."},
    {"function_time", function_time, METH_VARARGS,
     "Units of the seconds that a function gives for a length and a degree, rounded up."},
    {"pipeline_time", (PyCFunction)(void (*)(void))pipeline_time, METH_VARARGS | METH_KEYWORDS,
     "Makespan of micro-batches of these times in a pipeline."},
    {"fixed_sizes", fixed_sizes, METH_VARARGS, "Words of each table of fixed capacity."},
    {"plan_bound", (PyCFunction)(void (*)(void))plan_bound, METH_VARARGS | METH_KEYWORDS,
     "(bound, work) of every plan for a request."},
    {"create_plan_from", (PyCFunction)(void (*)(void))plan_create_from,
     METH_VARARGS | METH_KEYWORDS, "A plan from groups that somebody else chose, checked."},
    {NULL, NULL, 0, NULL}};

int hcp_py_add_plan(PyObject *module) {
#define TEXT(name, text) text,
  static const char *const syncs[] = {HCP_SYNCS(TEXT)};
  static const char *const comm_types[] = {HCP_COMM_TYPES(TEXT)};
#undef TEXT
  if (hcp_py_add_type(module, "Plan", &plan_spec) < 0 ||
      hcp_py_add_names(module, "PRICES", price_names, PRICE_COUNT) < 0 ||
      hcp_py_add_names(module, "LIMITS", limit_names, LIMIT_COUNT) < 0 ||
      hcp_py_add_names(module, "LIMIT_LISTS", list_names, LIMIT_LIST_COUNT) < 0 ||
      hcp_py_add_names(module, "SYNCS", syncs, HCP_SYNC_COUNT) < 0 ||
      hcp_py_add_names(module, "COMM_TYPES", comm_types, HCP_COMM_TYPE_COUNT) < 0)
    return -1;
  if (PyModule_AddIntConstant(module, "FULL_SPEED", HCP_FULL_SPEED) < 0 ||
      PyModule_AddIntConstant(module, "GATHERS_MAX", HCP_SCHEDULE_GATHERS_MAX) < 0)
    return -1;
  return PyModule_AddFunctions(module, functions);
}
