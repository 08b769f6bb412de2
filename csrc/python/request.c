/* request.c - arguments of a plan as C values. */
#include "request.h"

#include <string.h>

#define LISTED(name, count) ", " #name

void hcp_py_request_release(request *r) {
#define FREE(name, count) PyMem_Free(r->name);
  HCP_LIMIT_LISTS(FREE)
#undef FREE
  PyMem_Free(r->pairs);
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

static int read_number(PyObject *item, const char *name, size_t bytes, int64_t *value) {
  int32_t narrow;
  if (bytes > sizeof narrow) return hcp_py_int64(item, name, value);
  if (hcp_py_int32(item, name, &narrow) < 0) return -1;
  *value = narrow;
  return 0;
}

static int fill_limits(hcp_limits *limits, PyObject *tuple) {
  Py_ssize_t i = 0;
  int64_t value;
  if (!is_tuple(tuple, LIMIT_COUNT, "limits", "integers")) return -1;
#define READ(type, field, name)                                                          \
  if (read_number(PyTuple_GetItem(tuple, i++), #name, sizeof limits->field, &value) < 0) \
    return -1;                                                                           \
  limits->field = (type)value;
  HCP_LIMITS(READ)
#undef READ
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

/* Each of the lists may be None. */
static int fill_lists(request *r, PyObject *lists) {
  hcp_limits *limits = &r->limits;
  Py_ssize_t i = 0, n = r->n;
  if (!is_tuple(lists, LIMIT_LIST_COUNT, "lists", &(HCP_LIMIT_LISTS(LISTED))[2])) return -1;
#define READ(name, count)                                                            \
  if (fill_list(PyTuple_GetItem(lists, i++), #name, count, &r->name) < 0) return -1; \
  limits->name = r->name;
  HCP_LIMIT_LISTS(READ)
#undef READ
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

/* A function, and the seconds of a unit. */
static int fill_function(request *r, PyObject *function, PyObject *unit) {
  r->function = function;
  r->unit = PyFloat_AsDouble(unit);
  r->ask.time = hcp_py_time;
  return PyErr_Occurred() ? -1 : 0;
}

/* The cost table is None, or lengths, degrees, and times row after row, or in place of these a
 * function that gives them when they are asked for, and its unit. */
static int fill_times(request *r, PyObject *cost_table, Py_ssize_t rows, Py_ssize_t columns) {
  PyObject *times = PyTuple_GetItem(cost_table, 2);
  if (PyTuple_Size(cost_table) == 3)
    return integers(times, "table.times", rows * columns, &r->table_times);
  r->table_times = PyMem_Calloc((size_t)(rows * columns) + 1, sizeof *r->table_times);
  if (r->table_times == NULL) PyErr_NoMemory();
  return r->table_times == NULL ? -1 : fill_function(r, times, PyTuple_GetItem(cost_table, 3));
}

int hcp_py_fill_cost_table(request *r, PyObject *cost_table) {
  Py_ssize_t rows, columns;
  if (cost_table == Py_None) return 0;
  int asked = PyTuple_Check(cost_table) && PyTuple_Size(cost_table) == 4;
  if ((!asked && !is_tuple(cost_table, 3, "cost.table", "lengths, degrees, times")) ||
      hcp_py_int64s(PyTuple_GetItem(cost_table, 0), "table.lengths", &r->table_lengths, &rows) <
          0 ||
      hcp_py_int32s(PyTuple_GetItem(cost_table, 1), "table.degrees", &r->table_degrees, &columns) <
          0 ||
      fill_times(r, cost_table, rows, columns) < 0)
    return -1;
  r->times = (hcp_times){(int32_t)rows,    (int32_t)columns, r->table_lengths,
                         r->table_degrees, r->table_times,   r->function == NULL ? NULL : &r->ask};
  r->cost.times = &r->times;
  return 0;
}

void hcp_py_request_search(request *r, hcp_py_gil *gil) {
  hcp_py_drop_gil(gil, NULL);
  gil->function = r->function;
  gil->unit = r->unit;
  r->ask.context = gil;
}

int hcp_py_request_expect_times(const request *r) {
  if (r->function == NULL) return 0;
  PyErr_Format(PyExc_TypeError, "table.times is %R, expected integers", r->function);
  return -1;
}

/* None, or as many as lengths. */
static int fill_pairs(request *r, PyObject *pairs) {
  if (pairs == Py_None) return 0;
  if (integers(pairs, "pairs", r->n, &r->pairs) < 0) return -1;
  r->cost.pairs = r->pairs;
  return 0;
}

int hcp_py_request_fill(request *r, PyObject *lengths, PyObject *limits, PyObject *lists,
                        PyObject *prices, PyObject *cost_table, PyObject *pairs) {
  memset(r, 0, sizeof *r);
  if (hcp_py_int64s(lengths, "lengths", &r->lengths, &r->n) == 0 &&
      fill_limits(&r->limits, limits) == 0 && fill_lists(r, lists) == 0 &&
      hcp_py_fill_prices(&r->cost, prices) == 0 && hcp_py_fill_cost_table(r, cost_table) == 0 &&
      fill_pairs(r, pairs) == 0)
    return 0;
  hcp_py_request_release(r);
  return -1;
}
