/* request.c - arguments of a plan as C values. */
#include "request.h"

#include <string.h>

/* Of a request's limits, in the order in which Python gives them. */
#define LIMITS(X)            \
  X(ranks)                   \
  X(min_degree)              \
  X(max_degree)              \
  X(alignment)               \
  X(ranks_per_node)          \
  X(pow2)                    \
  X(pipeline.stages)         \
  X(pipeline.virtual_stages) \
  X(pipeline.group)
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

static int int32_from(int64_t value, const char *name, int32_t *out) {
  if (value >= INT32_MIN && value <= INT32_MAX) {
    *out = (int32_t)value;
    return 0;
  }
  PyErr_Format(PyExc_OverflowError, "%s is %lld, expected it to fit in 32 bits", name,
               (long long)value);
  return -1;
}

static int fill_limits(hcp_limits *limits, PyObject *sequence) {
  enum { COUNT = 1 LIMITS(ONE_MORE) WIDE_LIMITS(ONE_MORE) };
  int64_t *values;
  int32_t sync, failed = 0;
  if (integers(sequence, "limits", COUNT, &values) < 0) return -1;
  const int64_t *v = values;
#define NARROW(field) failed = failed || int32_from(*v++, #field, &limits->field) < 0;
  LIMITS(NARROW)
#undef NARROW
  failed = failed || int32_from(*v++, "sync", &sync) < 0;
#define WIDE(field) limits->field = *v++;
  if (!failed) {
    WIDE_LIMITS(WIDE)
    limits->sync = (hcp_sync)sync;
  }
#undef WIDE
  PyMem_Free(values);
  return failed ? -1 : 0;
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
  PyObject *least, *most, *slowness;
  if (!PyArg_ParseTuple(lists, "OOO:lists", &least, &most, &slowness) ||
      fill_list(least, "min_degrees", r->n, &r->min_degrees) < 0 ||
      fill_list(most, "max_degrees", r->n, &r->max_degrees) < 0 ||
      fill_list(slowness, "slowness", r->limits.ranks, &r->slowness) < 0)
    return -1;
  r->limits.min_degrees = r->min_degrees;
  r->limits.max_degrees = r->max_degrees;
  r->limits.slowness = r->slowness;
  return 0;
}

int hcp_py_fill_prices(hcp_cost *cost, PyObject *sequence) {
  int64_t *v;
  if (integers(sequence, "prices", PRICE_COUNT, &v) < 0) return -1;
  Py_ssize_t i = 0;
#define PRICE(name) cost->name = v[i++];
  HCP_PRICES(PRICE)
#undef PRICE
  PyMem_Free(v);
  return 0;
}

/* table is None, or lengths, degrees and times, row after row. */
int hcp_py_fill_table(request *r, PyObject *table) {
  PyObject *lengths, *degrees, *times;
  Py_ssize_t rows, columns;
  if (table == Py_None) return 0;
  if (!PyArg_ParseTuple(table, "OOO:table", &lengths, &degrees, &times) ||
      hcp_py_int64s(lengths, "table lengths", &r->table_lengths, &rows) < 0 ||
      hcp_py_int32s(degrees, "table degrees", &r->table_degrees, &columns) < 0 ||
      integers(times, "table times", rows * columns, &r->table_times) < 0)
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
