/* request.c - arguments of a plan as C values. */
#include "request.h"

#include <string.h>

/* Of a request's limits, in the order in which Python gives them. */
#define LIMITS(X)                            \
  X(ranks, ranks)                            \
  X(min_degree, min_degree)                  \
  X(max_degree, max_degree)                  \
  X(alignment, alignment)                    \
  X(ranks_per_node, ranks_per_node)          \
  X(pow2, pow2)                              \
  X(pipeline_stages, pipeline.stages)        \
  X(virtual_stages, pipeline.virtual_stages) \
  X(micro_batch_group, pipeline.group)
#define WIDE_LIMITS(X)   \
  X(max_tokens_per_rank) \
  X(memory.activation)   \
  X(memory.logit)        \
  X(memory.gathered)     \
  X(memory.limit)

void hcp_py_request_release(request *r) {
  PyMem_Free(r->slowness);
  PyMem_Free(r->max_degrees);
  PyMem_Free(r->min_degrees);
  PyMem_Free(r->table_degrees);
  PyMem_Free(r->table_times);
  PyMem_Free(r->table_lengths);
  PyMem_Free(r->lengths);
}

/* Exactly count integers of a sequence. */
static int integers(PyObject *sequence, const char *name, Py_ssize_t count, int64_t **values) {
  Py_ssize_t n;
  if (hcp_py_int64s(sequence, name, values, &n) < 0) return -1;
  if (n == count) return 0;
  PyErr_Format(PyExc_ValueError, "%s has %zd items, expected %zd", name, n, count);
  PyMem_Free(*values);
  *values = NULL;
  return -1;
}

/* A tuple of that size, else an exception that says its items. */
static int is_tuple(PyObject *object, Py_ssize_t n, const char *name, const char *items) {
  if (PyTuple_Check(object) && PyTuple_Size(object) == n) return 1;
  PyErr_Format(PyExc_TypeError, "%s is %R, expected a tuple of %zd: %s", name, object, n, items);
  return 0;
}

static int fill_limits(hcp_limits *limits, PyObject *tuple) {
#define ONE_FIELD(name, field) +1 /* NOLINT(bugprone-macro-parentheses): a term */
  enum { COUNT = 1 LIMITS(ONE_FIELD) WIDE_LIMITS(ONE_MORE) };
#undef ONE_FIELD
  int32_t sync;
  Py_ssize_t i = 0;
  if (!is_tuple(tuple, COUNT, "limits", "integers")) return -1;
#define NARROW(name, field) \
  if (hcp_py_int32(PyTuple_GetItem(tuple, i++), #name, &limits->field) < 0) return -1;
  LIMITS(NARROW)
#undef NARROW
  if (hcp_py_int32(PyTuple_GetItem(tuple, i++), "sync", &sync) < 0) return -1;
  limits->sync = (hcp_sync)sync;
#define WIDE(field) \
  if (hcp_py_int64(PyTuple_GetItem(tuple, i++), #field, &limits->field) < 0) return -1;
  WIDE_LIMITS(WIDE)
#undef WIDE
  return 0;
}

/* None, or exactly count integers. */
static int fill_list(PyObject *list, const char *name, Py_ssize_t count, int32_t **values) {
  Py_ssize_t n;
  if (list == Py_None) return 0;
  if (hcp_py_int32s(list, name, values, &n) < 0) return -1;
  if (n == count) return 0;
  PyErr_Format(PyExc_ValueError, "%s has %zd items, expected %zd", name, n, count);
  return -1;
}

/* lists is min_degrees, max_degrees and slowness, each of which may be None. */
static int fill_lists(request *r, PyObject *lists) {
  if (!is_tuple(lists, 3, "lists", "min_degrees, max_degrees, slowness") ||
      fill_list(PyTuple_GetItem(lists, 0), "min_degrees", r->n, &r->min_degrees) < 0 ||
      fill_list(PyTuple_GetItem(lists, 1), "max_degrees", r->n, &r->max_degrees) < 0 ||
      fill_list(PyTuple_GetItem(lists, 2), "slowness", r->limits.ranks, &r->slowness) < 0)
    return -1;
  r->limits.min_degrees = r->min_degrees;
  r->limits.max_degrees = r->max_degrees;
  r->limits.slowness = r->slowness;
  return 0;
}

int hcp_py_fill_prices(hcp_cost *cost, PyObject *tuple) {
  Py_ssize_t i = 0;
  if (!is_tuple(tuple, PRICE_COUNT, "prices", "integers")) return -1;
#define PRICE(name) \
  if (hcp_py_int64(PyTuple_GetItem(tuple, i++), "cost." #name, &cost->name) < 0) return -1;
  HCP_PRICES(PRICE)
#undef PRICE
  return 0;
}

/* table is None, or lengths, degrees and times, row after row. */
int hcp_py_fill_table(request *r, PyObject *table) {
  Py_ssize_t rows, columns;
  if (table == Py_None) return 0;
  if (!is_tuple(table, 3, "cost.table", "lengths, degrees, times") ||
      hcp_py_int64s(PyTuple_GetItem(table, 0), "table.lengths", &r->table_lengths, &rows) < 0 ||
      hcp_py_int32s(PyTuple_GetItem(table, 1), "table.degrees", &r->table_degrees, &columns) < 0 ||
      integers(PyTuple_GetItem(table, 2), "table.times", rows * columns, &r->table_times) < 0)
    return -1;
  r->times = (hcp_times){(int32_t)rows, (int32_t)columns, r->table_lengths, r->table_degrees,
                         r->table_times};
  r->cost.times = &r->times;
  return 0;
}

int hcp_py_request_fill(request *r, PyObject *lengths, PyObject *limits, PyObject *lists,
                        PyObject *prices, PyObject *table) {
  memset(r, 0, sizeof *r);
  if (hcp_py_int64s(lengths, "lengths", &r->lengths, &r->n) == 0 &&
      fill_limits(&r->limits, limits) == 0 && fill_lists(r, lists) == 0 &&
      hcp_py_fill_prices(&r->cost, prices) == 0 && hcp_py_fill_table(r, table) == 0)
    return 0;
  hcp_py_request_release(r);
  return -1;
}
