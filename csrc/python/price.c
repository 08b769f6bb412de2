/* price.c - prices of groups and plans, rows, nodes and bytes, as functions of hcp._core. */
#include <string.h>

#include "glue.h"

/* ---- lists ---- */

/* A new list of count values that stand `stride` bytes apart. */
static PyObject *integers_from(const void *values, Py_ssize_t count, size_t stride) {
  PyObject *list = PyList_New(count);
  for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
    int64_t value;
    memcpy(&value, (const char *)values + (size_t)i * stride, sizeof value);
    PyObject *item = PyLong_FromLongLong(value);
    if (item == NULL || PyList_SetItem(list, i, item) < 0) Py_CLEAR(list);
  }
  return list;
}

static PyObject *floats_from(const void *values, Py_ssize_t count, size_t stride) {
  PyObject *list = PyList_New(count);
  for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
    double value;
    memcpy(&value, (const char *)values + (size_t)i * stride, sizeof value);
    PyObject *item = PyFloat_FromDouble(value);
    if (item == NULL || PyList_SetItem(list, i, item) < 0) Py_CLEAR(list);
  }
  return list;
}

/* ---- rows and nodes ---- */

static PyObject *rows_held(PyObject *module, PyObject *args) {
  long long length;
  int degree, j;
  (void)module;
  if (!PyArg_ParseTuple(args, "Lii:rows_held", &length, &degree, &j)) return NULL;
  if (length < 0 || degree < 1 || degree > INT32_MAX / 2 || j < 0 || j >= degree)
    return PyErr_Format(PyExc_ValueError,
                        "length is %lld, degree %d and j %d, expected length >= 0, degree >= 1 and "
                        "0 <= j < degree",
                        length, degree, j);
  return PyLong_FromLongLong(hcp_rows_held(length, degree, j));
}

static PyObject *rows_up_to(PyObject *module, PyObject *args) {
  long long length;
  int degree;
  (void)module;
  if (!PyArg_ParseTuple(args, "Li:rows_up_to", &length, &degree)) return NULL;
  if (length < 0 || degree < 1)
    return PyErr_Format(PyExc_ValueError,
                        "length is %lld and degree %d, expected length >= 0 and degree >= 1",
                        length, degree);
  return PyLong_FromLongLong(hcp_rows_up_to(length, degree));
}

static PyObject *nodes_of(PyObject *module, PyObject *args) {
  int first, degree, node;
  (void)module;
  if (!PyArg_ParseTuple(args, "iii:nodes_of", &first, &degree, &node)) return NULL;
  if (first < 0 || degree < 1 || degree > INT32_MAX - first || node < 0)
    return PyErr_Format(PyExc_ValueError,
                        "first_rank is %d, degree %d and ranks_per_node %d, expected >= 0, >= 1 "
                        "and >= 0",
                        first, degree, node);
  return PyLong_FromLong(hcp_nodes_of(first, degree, node));
}

static PyObject *nodes_allow(PyObject *module, PyObject *args) {
  int degree, node;
  (void)module;
  if (!PyArg_ParseTuple(args, "ii:nodes_allow", &degree, &node)) return NULL;
  if (degree < 1 || node < 0)
    return PyErr_Format(PyExc_ValueError,
                        "degree is %d and ranks_per_node %d, expected >= 1 and >= 0", degree, node);
  return PyBool_FromLong(hcp_nodes_allow(degree, node));
}

/* ---- bytes ---- */

/* A tuple in the order of HCP_MEMORY_LIMITS. */
static int fill_memory(hcp_memory *memory, PyObject *tuple) {
  Py_ssize_t i = 0;
#define COUNT(type, field, name) +1 /* NOLINT(bugprone-macro-parentheses): a term */
  if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 0 HCP_MEMORY_LIMITS(COUNT, )) {
    PyErr_Format(PyExc_TypeError, "memory is %R, expected a tuple of its integers", tuple);
    return -1;
  }
#undef COUNT
#define READ(type, field, name) \
  if (hcp_py_int64(PyTuple_GetItem(tuple, i++), #name, &memory->field) < 0) return -1;
  HCP_MEMORY_LIMITS(READ, )
#undef READ
  return 0;
}

/* (memory, rows, tokens, degree) */
static int memory_arguments(PyObject *args, hcp_memory *memory, int64_t *rows, int64_t *tokens,
                            int32_t *degree) {
  PyObject *tuple, *rows_object, *tokens_object, *degree_object;
  if (!PyArg_ParseTuple(args, "OOOO", &tuple, &rows_object, &tokens_object, &degree_object) ||
      fill_memory(memory, tuple) < 0 || hcp_py_int64(rows_object, "rows", rows) < 0 ||
      hcp_py_int64(tokens_object, "tokens", tokens) < 0)
    return -1;
  return hcp_py_int32(degree_object, "degree", degree);
}

static PyObject *memory_bytes(PyObject *module, PyObject *args) {
  hcp_memory memory;
  int64_t rows, tokens;
  int32_t degree;
  (void)module;
  if (memory_arguments(args, &memory, &rows, &tokens, &degree) < 0) return NULL;
  return PyLong_FromLongLong(hcp_memory_bytes(&memory, rows, tokens, degree));
}

static PyObject *memory_chunks(PyObject *module, PyObject *args) {
  hcp_memory memory;
  int64_t rows, tokens;
  int32_t degree;
  (void)module;
  if (memory_arguments(args, &memory, &rows, &tokens, &degree) < 0) return NULL;
  return PyLong_FromLongLong(hcp_memory_chunks(&memory, rows, tokens, degree));
}

/* ---- groups ---- */

static PyObject *group_times(PyObject *module, PyObject *args) {
  PyObject *object, *list;
  int first, degree;
  int32_t *sequences;
  Py_ssize_t n;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "OiiO:group_times", &object, &first, &degree, &list)) return NULL;
  const hcp_plan *plan = hcp_py_plan(module, object);
  if (plan == NULL || hcp_py_int32s(list, "sequences", &sequences, &n) < 0) return NULL;
  int64_t *ends = PyMem_Malloc(((size_t)n + 1) * sizeof *ends);
  hcp_status status = ends == NULL
                          ? HCP_NO_MEMORY
                          : hcp_group_times(plan, first, degree, sequences, (int32_t)n, ends, &err);
  PyObject *result = ends == NULL       ? PyErr_NoMemory()
                     : status != HCP_OK ? hcp_py_raise(&err)
                                        : integers_from(ends, n, sizeof *ends);
  PyMem_Free(ends);
  PyMem_Free(sequences);
  return result;
}

static PyObject *group_chunks(PyObject *module, PyObject *args) {
  PyObject *object;
  int micro_batch, rank;
  int64_t chunks;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "Oii:group_chunks", &object, &micro_batch, &rank)) return NULL;
  const hcp_plan *plan = hcp_py_plan(module, object);
  if (plan == NULL) return NULL;
  if (hcp_group_chunks(plan, micro_batch, rank, &chunks, &err) != HCP_OK) return hcp_py_raise(&err);
  return PyLong_FromLongLong(chunks);
}

static PyObject *comm_inner(PyObject *module, PyObject *args) {
  PyObject *object, *most_object;
  int micro_batch, rank, query_heads;
  int64_t most;
  int32_t inner;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "OiiiO:comm_inner", &object, &micro_batch, &rank, &query_heads,
                        &most_object) ||
      hcp_py_int64(most_object, "most", &most) < 0)
    return NULL;
  const hcp_plan *plan = hcp_py_plan(module, object);
  if (plan == NULL) return NULL;
  if (hcp_comm_inner(plan, micro_batch, rank, query_heads,
                     most < INT32_MAX ? (int32_t)most : INT32_MAX, &inner, &err) != HCP_OK)
    return hcp_py_raise(&err);
  return PyLong_FromLong(inner);
}

/* Tuples of (comm type, inner, time). */
static PyObject *listed(const hcp_comm_time *times, int32_t count) {
  PyObject *list = PyList_New(count);
  for (int32_t i = 0; list != NULL && i < count; i++) {
    PyObject *item = Py_BuildValue("(siL)", hcp_comm_type_name(times[i].comm_type),
                                   (int)times[i].inner, (long long)times[i].time);
    if (item == NULL || PyList_SetItem(list, i, item) < 0) Py_CLEAR(list);
  }
  return list;
}

static PyObject *comm_times(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"plan",      "micro_batch", "rank",         "left",
                             "right",     "query_heads", "key_heads",    "packed",
                             "rows_only", "in_place",    "stage_tokens", NULL};
  PyObject *object;
  int micro_batch, rank, packed, rows_only, in_place;
  long long left, right, stage_tokens;
  hcp_priced_layer layer;
  hcp_comm_time times[HCP_COMM_TIMES_MAX];
  int32_t count, fastest;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OiiLLiipppL:comm_times", keywords, &object,
                                   &micro_batch, &rank, &left, &right, &layer.query_heads,
                                   &layer.key_heads, &packed, &rows_only, &in_place, &stage_tokens))
    return NULL;
  const hcp_plan *plan = hcp_py_plan(module, object);
  if (plan == NULL) return NULL;
  layer.left = left;
  layer.right = right;
  layer.packed = packed;
  layer.rows_only = rows_only;
  layer.in_place = in_place;
  if (hcp_comm_times(plan, micro_batch, rank, &layer, stage_tokens, times, &count, &fastest,
                     &err) != HCP_OK)
    return hcp_py_raise(&err);
  PyObject *list = listed(times, count);
  return list == NULL ? NULL : Py_BuildValue("(Ni)", list, (int)fastest);
}

/* ---- whole plans ---- */

#define COLUMN(make, ranks, plan, field) \
  make(&(ranks)->field, (plan)->limits.ranks, sizeof *(ranks))

static PyObject *measure_plan(PyObject *module, PyObject *object) {
  hcp_plan_work work;
  const hcp_plan *plan = hcp_py_plan(module, object);
  if (plan == NULL) return NULL;
  hcp_rank_work *ranks = PyMem_Malloc((size_t)plan->limits.ranks * sizeof *ranks);
  if (ranks == NULL) return PyErr_NoMemory();
  hcp_plan_measure(plan, ranks, &work);
  PyObject *result = Py_BuildValue(
      "(NNNN(LLL))", COLUMN(integers_from, ranks, plan, rows),
      COLUMN(integers_from, ranks, plan, bytes), COLUMN(integers_from, ranks, plan, busy),
      COLUMN(integers_from, ranks, plan, end), (long long)work.peak_rows, (long long)work.padding,
      (long long)work.crossings);
  PyMem_Free(ranks);
  return result;
}

#define MACHINE_NAME(name) #name,
static const char *const machine_names[] = {HCP_MACHINE_TIMES(MACHINE_NAME)};
#undef MACHINE_NAME
enum { MACHINE_TIMES = sizeof machine_names / sizeof *machine_names };

static int fill_seconds(hcp_machine *machine, PyObject *tuple) {
  Py_ssize_t i = 0;
  if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != MACHINE_TIMES) {
    PyErr_Format(PyExc_TypeError, "seconds is %R, expected a tuple of %d numbers", tuple,
                 MACHINE_TIMES);
    return -1;
  }
#define READ(name)                                               \
  machine->name = PyFloat_AsDouble(PyTuple_GetItem(tuple, i++)); \
  if (PyErr_Occurred()) return -1;
  HCP_MACHINE_TIMES(READ)
#undef READ
  return 0;
}

static PyObject *replay_plan(PyObject *module, PyObject *args) {
  PyObject *object, *seconds, *memory;
  int overlap, node, once;
  hcp_machine machine;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "OOpipO:replay_plan", &object, &seconds, &overlap, &node, &once,
                        &memory))
    return NULL;
  const hcp_plan *plan = hcp_py_plan(module, object);
  if (plan == NULL || fill_seconds(&machine, seconds) < 0 ||
      fill_memory(&machine.memory, memory) < 0)
    return NULL;
  machine.overlap = overlap;
  machine.ranks_per_node = node;
  machine.once = once;
  hcp_rank_seconds *ranks = PyMem_Malloc((size_t)plan->limits.ranks * sizeof *ranks);
  if (ranks == NULL) return PyErr_NoMemory();
  hcp_status status = hcp_plan_replay(plan, &machine, ranks, &err);
  PyObject *result = status != HCP_OK
                         ? hcp_py_raise(&err)
                         : Py_BuildValue("(NNNN)", COLUMN(floats_from, ranks, plan, busy),
                                         COLUMN(floats_from, ranks, plan, exposed),
                                         COLUMN(floats_from, ranks, plan, starved),
                                         COLUMN(floats_from, ranks, plan, end));
  PyMem_Free(ranks);
  return result;
}

static PyMethodDef functions[] = {
    {"rows_held", rows_held, METH_VARARGS, "Rows of rank j if degree ranks share a length."},
    {"rows_up_to", rows_up_to, METH_VARARGS, "The most rows of a rank, of any length up to one."},
    {"nodes_of", nodes_of, METH_VARARGS, "Nodes that consecutive ranks are in."},
    {"nodes_allow", nodes_allow, METH_VARARGS, "Whether a group may have so many ranks."},
    {"memory_bytes", memory_bytes, METH_VARARGS, "Bytes of rows and tokens on a rank."},
    {"memory_chunks", memory_chunks, METH_VARARGS, "The fewest chunks of heads that fit."},
    {"group_times", group_times, METH_VARARGS, "The end of each sequence of a group."},
    {"group_chunks", group_chunks, METH_VARARGS, "The fewest chunks of heads of a rank's group."},
    {"comm_inner", comm_inner, METH_VARARGS, "The most neighbours that may exchange layer."},
    {"comm_times", (PyCFunction)(void (*)(void))comm_times, METH_VARARGS | METH_KEYWORDS,
     "(comm type, inner, time) of all that a group may use, and the index of the fastest."},
    {"measure_plan", measure_plan, METH_O,
     "Rows, bytes, busy time and end of each rank; peak rows, padding and crossings."},
    {"replay_plan", replay_plan, METH_VARARGS,
     "Busy, exposed, starved and last seconds of each rank of a machine."},
    {NULL, NULL, 0, NULL}};

int hcp_py_add_prices(PyObject *module) {
  if (hcp_py_add_names(module, "MACHINE_TIMES", machine_names, MACHINE_TIMES) < 0) return -1;
  return PyModule_AddFunctions(module, functions);
}
