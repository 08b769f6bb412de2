/* launches.c - tables made of numbers alone: launches of a kernel, rounds of messages,
 * pairs of a mask. */
#include "glue.h"

/* The 64-bit numbers of a buffer, read-only. Returns 0, or -1 with an exception set. */
static int numbers_from(PyObject *object, const char *name, Py_ssize_t width, Py_buffer *view) {
  Py_ssize_t bytes = width * (Py_ssize_t)sizeof(int64_t);
  if (PyObject_GetBuffer(object, view, PyBUF_SIMPLE) < 0) return -1;
  int aligned = view->len == 0 || (uintptr_t)view->buf % sizeof(int64_t) == 0;
  if (view->len % bytes == 0 && aligned) return 0;
  PyErr_Format(PyExc_ValueError, "%s has %zd bytes, expected aligned records of %zd", name,
               view->len, bytes);
  PyBuffer_Release(view);
  return -1;
}

static PyObject *launches(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"words", "packs", "waiting", NULL};
  PyObject *words, *waiting;
  int packs;
  hcp_kernel kernel;
  Py_buffer view;
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OpO:launches", keywords, &words, &packs,
                                   &waiting) ||
      hcp_py_int64(waiting, "waiting", &kernel.waiting) < 0 ||
      numbers_from(words, "words", 1, &view) < 0)
    return NULL;
  kernel.packs = packs;
  hcp_status status;
  Py_BEGIN_ALLOW_THREADS status = hcp_launches_create(
      view.buf, (int64_t)(view.len / (Py_ssize_t)sizeof(int64_t)), &kernel, &table, &err);
  Py_END_ALLOW_THREADS PyBuffer_Release(&view);
  return status == HCP_OK ? hcp_py_table(module, table) : hcp_py_raise(&err);
}

/* The records of a buffer of so many numbers each. */
static int64_t records_in(const Py_buffer *view, Py_ssize_t width) {
  return view->len / (width * (Py_ssize_t)sizeof(int64_t));
}

static PyObject *join_entries(PyObject *module, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"entries", "packs", "query_runs", "key_runs", NULL};
  static const Py_ssize_t widths[3] = {6, 4, 4};
  PyObject *given[3] = {NULL, NULL, NULL};
  Py_buffer views[3] = {{0}};
  hcp_kernel kernel = {0};
  hcp_table *table = NULL;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Op|OO:join_entries", keywords, &given[0],
                                   &kernel.packs, &given[1], &given[2]))
    return NULL;
  int held = 0;
  while (held < 3 && (given[held] == NULL || numbers_from(given[held], keywords[held + (held > 0)],
                                                          widths[held], &views[held]) == 0))
    held++;
  hcp_status status = HCP_OK;
  if (held == 3) {
    const hcp_entries entries = {.entries = views[0].buf,
                                 .count = records_in(&views[0], 6),
                                 .query_runs = views[1].buf,
                                 .query_run_count = records_in(&views[1], 4),
                                 .key_runs = views[2].buf,
                                 .key_run_count = records_in(&views[2], 4)};
    Py_BEGIN_ALLOW_THREADS status = hcp_launches_join(&entries, &kernel, &table, &err);
    Py_END_ALLOW_THREADS
  }
  int whole = held == 3;
  while (held > 0)
    if (given[--held] != NULL) PyBuffer_Release(&views[held]);
  if (!whole) return NULL;
  return status == HCP_OK ? hcp_py_table(module, table) : hcp_py_raise(&err);
}

static PyObject *mailbox_rounds(PyObject *module, PyObject *args) {
  PyObject *sends, *receives, *rows;
  hcp_moves sent, received;
  int64_t mailbox_rows;
  int64_t *values[2] = {NULL, NULL};
  Py_ssize_t counts[2];
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "OOO:mailbox_rounds", &sends, &receives, &rows) ||
      hcp_py_int64(rows, "mailbox_rows", &mailbox_rows) < 0 ||
      hcp_py_int64s(sends, "sends", &values[0], &counts[0]) < 0)
    return NULL;
  if (hcp_py_int64s(receives, "receives", &values[1], &counts[1]) < 0) {
    PyMem_Free(values[0]);
    return NULL;
  }
  sent = (hcp_moves){values[0], counts[0] / 3};
  received = (hcp_moves){values[1], counts[1] / 3};
  hcp_status status;
  Py_BEGIN_ALLOW_THREADS status = hcp_mailbox_create(&sent, &received, mailbox_rows, &table, &err);
  Py_END_ALLOW_THREADS PyMem_Free(values[0]);
  PyMem_Free(values[1]);
  return status == HCP_OK ? hcp_py_table(module, table) : hcp_py_raise(&err);
}

/* ---- slices of a mask ---- */

/* The slices of a sequence of numbers, six each, which the caller frees. */
static int slices_from(PyObject *words, hcp_slice **slices, int64_t *n) {
  int64_t *values;
  Py_ssize_t count;
  if (hcp_py_int64s(words, "words", &values, &count) < 0) return -1;
  *slices = (hcp_slice *)(void *)values;
  *n = count / 6;
  return 0;
}

static PyObject *slices_pairs(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *words, *ends[2];
  int64_t n, first, end;
  hcp_slice *slices;
  if (!PyArg_ParseTuple(args, "OOO:slices_pairs", &words, &ends[0], &ends[1]) ||
      hcp_py_int64(ends[0], "first", &first) < 0 || hcp_py_int64(ends[1], "end", &end) < 0 ||
      slices_from(words, &slices, &n) < 0)
    return NULL;
  int64_t pairs = hcp_slices_pairs(slices, n, first, end);
  PyMem_Free(slices);
  return PyLong_FromLongLong(pairs);
}

static PyObject *slices_overlap(PyObject *module, PyObject *words) {
  (void)module;
  hcp_slice *slices;
  hcp_common_pair x;
  hcp_error err;
  int64_t n;
  int32_t overlap;
  if (slices_from(words, &slices, &n) < 0) return NULL;
  hcp_status status;
  Py_BEGIN_ALLOW_THREADS status = hcp_slices_overlap(slices, n, &overlap, &x, &err);
  Py_END_ALLOW_THREADS PyMem_Free(slices);
  if (status != HCP_OK) return hcp_py_raise(&err);
  if (!overlap) Py_RETURN_NONE;
  return Py_BuildValue("(LLLL)", (long long)x.slice, (long long)x.other, (long long)x.query,
                       (long long)x.key);
}

static PyMethodDef functions[] = {
    {"slices_pairs", slices_pairs, METH_VARARGS,
     "Pairs that queries from first up to end see, of a mask's words."},
    {"slices_overlap", slices_overlap, METH_O,
     "Two slices of a mask's words that see the same pair, with its query and key, or None."},
    {"mailbox_rounds", mailbox_rounds, METH_VARARGS,
     "Messages of (peer, row, rows) through mailboxes of so many rows, as words of a table."},
    {"launches", (PyCFunction)(void (*)(void))launches, METH_VARARGS | METH_KEYWORDS,
     "A schedule's launches of a kernel, as words of a table."},
    {"join_entries", (PyCFunction)(void (*)(void))join_entries, METH_VARARGS | METH_KEYWORDS,
     "Entries of one stage as launches, and runs over them, as words of a table."},
    {NULL, NULL, 0, NULL}};

int hcp_py_add_launches(PyObject *module) { return PyModule_AddFunctions(module, functions); }
