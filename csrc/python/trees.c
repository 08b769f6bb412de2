/* trees.c - rollouts in, prefix trees out. */
#include "request.h"

typedef struct arguments {
  Py_buffer tokens;
  int64_t *lengths;
  request prices; /* of its cost alone */
  hcp_rollouts rollouts;
  hcp_tree_limits limits;
} arguments;

static void release(arguments *a) {
  PyMem_Free(a->lengths);
  hcp_py_request_release(&a->prices);
  PyBuffer_Release(&a->tokens);
}

/* The tokens are as many as the lengths say. */
static int expect_tokens(const arguments *a) {
  int64_t bytes = a->rollouts.token_bytes, room = a->tokens.len / (Py_ssize_t)bytes, sum = 0;
  for (int64_t i = 0; i < a->rollouts.n && sum >= 0; i++) {
    int64_t length = a->lengths[i];
    sum = length < 0 || length > room - sum ? -1 : sum + length;
  }
  if (sum == room && a->tokens.len % (Py_ssize_t)bytes == 0) return 0;
  PyErr_Format(PyExc_ValueError,
               "tokens has %zd bytes, expected %lld for each token of the lengths' sum",
               a->tokens.len, (long long)bytes);
  return -1;
}

/* prices: None, or those of a cost. */
static int fill_limits(arguments *a, PyObject *prices, PyObject *numbers[4]) {
  hcp_tree_limits *limits = &a->limits;
  if (hcp_py_int64(numbers[0], "max_tokens", &limits->max_rows) < 0 ||
      hcp_py_int64(numbers[1], "min_shared", &limits->min_shared) < 0 ||
      hcp_py_int64(numbers[2], "max_tokens_per_rank", &limits->max_tokens_per_rank) < 0 ||
      hcp_py_int32(numbers[3], "ranks_per_node", &limits->ranks_per_node) < 0)
    return -1;
  if (prices == Py_None) return 0;
  limits->cost = &a->prices.cost;
  return hcp_py_fill_prices(&a->prices.cost, prices);
}

static int fill_rollouts(arguments *a, PyObject *lengths, int token_bytes) {
  Py_ssize_t n;
  if (token_bytes != 4 && token_bytes != 8) {
    PyErr_Format(PyExc_ValueError, "token_bytes is %d, expected 4 or 8", token_bytes);
    return -1;
  }
  if (hcp_py_int64s(lengths, "lengths", &a->lengths, &n) < 0) return -1;
  a->rollouts = (hcp_rollouts){a->tokens.buf, token_bytes, a->lengths, n};
  return expect_tokens(a);
}

static PyObject *trees(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"tokens",         "token_bytes", "lengths",
                             "max_tokens",     "min_shared",  "max_tokens_per_rank",
                             "ranks_per_node", "prices",      NULL};
  PyObject *tokens, *lengths, *numbers[4], *prices;
  int token_bytes;
  arguments a = {0};
  hcp_table *table = NULL;
  hcp_py_gil gil;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OiOOOOOO:trees", keywords, &tokens, &token_bytes,
                                   &lengths, &numbers[0], &numbers[1], &numbers[2], &numbers[3],
                                   &prices) ||
      PyObject_GetBuffer(tokens, &a.tokens, PyBUF_SIMPLE) < 0)
    return NULL;
  if (fill_rollouts(&a, lengths, token_bytes) < 0 || fill_limits(&a, prices, numbers) < 0) {
    release(&a);
    return NULL;
  }
  hcp_py_drop_gil(&gil, NULL);
  hcp_status status = hcp_trees_create(&a.rollouts, &a.limits, &gil.stop, &table, &err);
  int raised = hcp_py_take_gil(&gil);
  release(&a);
  if (raised) hcp_table_destroy(table);
  if (raised) return NULL;
  return status == HCP_OK ? hcp_py_table(module, table) : hcp_py_raise(&err);
}

static PyObject *tree_mask(PyObject *module, PyObject *args) {
  PyObject *given[2];
  int64_t *rows = NULL, *parents = NULL;
  Py_ssize_t n, parent_count;
  hcp_table *table = NULL;
  hcp_error err = {HCP_INVALID, ""};
  hcp_status status = HCP_INVALID;
  int filled = PyArg_ParseTuple(args, "OO:tree_mask", &given[0], &given[1]) &&
               hcp_py_int64s(given[0], "lengths", &rows, &n) == 0 &&
               hcp_py_int64s(given[1], "parents", &parents, &parent_count) == 0;
  if (filled && parent_count != n) {
    PyErr_Format(PyExc_ValueError, "parents has %zd items, expected %zd", parent_count, n);
    filled = 0;
  }
  if (filled) status = hcp_tree_mask_create(&(hcp_tree_parts){rows, parents, 1, n}, &table, &err);
  PyMem_Free(rows);
  PyMem_Free(parents);
  if (!filled) return NULL;
  return status == HCP_OK ? hcp_py_table(module, table) : hcp_py_raise(&err);
}

static PyMethodDef functions[] = {
    {"tree_mask", tree_mask, METH_VARARGS,
     "What tokens of a tree of parts see, by their lengths and parents, as words of a table."},
    {"trees", (PyCFunction)(void (*)(void))trees, METH_VARARGS | METH_KEYWORDS,
     "Prefix trees of rollouts, as words of a table."},
    {NULL, NULL, 0, NULL}};

int hcp_py_add_trees(PyObject *module) { return PyModule_AddFunctions(module, functions); }
