/* launches.c - tables made of numbers alone: launches of a kernel, blocks of ranks, pairs of a
 * mask; and what the words of a table say. */
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

static PyObject *heads(PyObject *module, PyObject *args) {
  PyObject *words, *given;
  Py_buffer view, shares;
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "OO:heads", &words, &given) ||
      numbers_from(words, "words", 1, &view) < 0)
    return NULL;
  if (numbers_from(given, "shares", 4, &shares) < 0) {
    PyBuffer_Release(&view);
    return NULL;
  }
  hcp_status status = hcp_heads_create(view.buf, records_in(&view, 1), shares.buf,
                                       records_in(&shares, 4), &table, &err);
  PyBuffer_Release(&shares);
  PyBuffer_Release(&view);
  return status == HCP_OK ? hcp_py_table(module, table) : hcp_py_raise(&err);
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

static PyObject *packed(PyObject *module, PyObject *args) {
  PyObject *entries, *number;
  Py_buffer view;
  int64_t sequences;
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "OO:packed", &entries, &number) ||
      hcp_py_int64(number, "sequences", &sequences) < 0 ||
      numbers_from(entries, "entries", 6, &view) < 0)
    return NULL;
  hcp_status status = hcp_packed_create(view.buf, records_in(&view, 6), sequences, &table, &err);
  PyBuffer_Release(&view);
  return status == HCP_OK ? hcp_py_table(module, table) : hcp_py_raise(&err);
}

static PyObject *block(PyObject *module, PyObject *args) {
  static const char *const names[3] = {"first", "ranks", "rank"};
  PyObject *objects[4];
  int32_t numbers[3];
  int64_t rows;
  hcp_table *table;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "OOOO:block", &objects[0], &objects[1], &objects[2], &objects[3]) ||
      hcp_py_int64(objects[3], "rows", &rows) < 0)
    return NULL;
  for (int i = 0; i < 3; i++)
    if (hcp_py_int32(objects[i], names[i], &numbers[i]) < 0) return NULL;
  if (hcp_block_create(numbers[0], numbers[1], numbers[2], rows, &table, &err) != HCP_OK)
    return hcp_py_raise(&err);
  return hcp_py_table(module, table);
}

/* ---- what words say ---- */

/* n records of so many numbers each, as a list of tuples. */
static PyObject *list_of(const int64_t *numbers, Py_ssize_t n, Py_ssize_t width) {
  PyObject *list = PyList_New(n);
  for (Py_ssize_t i = 0; list != NULL && i < n; i++) {
    PyObject *record = hcp_py_tuple(numbers + i * width, width);
    if (record == NULL || PyList_SetItem(list, i, record) < 0) Py_CLEAR(list);
  }
  return list;
}

static PyObject *places_of(const hcp_section *sections, Py_ssize_t n) {
  return list_of(&sections->first, n, sizeof *sections / sizeof sections->first);
}

/* The widths of sections, ((name, words per record), ...). Returns their number, or -1. */
static Py_ssize_t widths_from(PyObject *sections, int32_t widths[HCP_PY_SECTIONS_MAX]) {
  Py_ssize_t n = PyTuple_Size(sections);
  if (n > HCP_PY_SECTIONS_MAX) PyErr_Format(PyExc_ValueError, "sections has %zd items", n);
  if (n < 0 || n > HCP_PY_SECTIONS_MAX) return -1;
  for (Py_ssize_t i = 0; i < n; i++) {
    const char *name;
    int width;
    if (!PyArg_ParseTuple(PyTuple_GetItem(sections, i), "si:sections", &name, &width)) return -1;
    if (width < 1) {
      PyErr_Format(PyExc_ValueError, "%s has records of %d words, expected >= 1", name, width);
      return -1;
    }
    widths[i] = width;
  }
  return n;
}

static PyObject *read_table(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *words, *sections;
  int32_t widths[HCP_PY_SECTIONS_MAX] = {0};
  hcp_section found[HCP_PY_SECTIONS_MAX];
  Py_buffer view;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "OO!:read_table", &words, &PyTuple_Type, &sections)) return NULL;
  Py_ssize_t n = widths_from(sections, widths);
  if (n < 0 || numbers_from(words, "words", 1, &view) < 0) return NULL;
  hcp_status status = hcp_table_read(view.buf, records_in(&view, 1), HCP_TABLE_HEADER, (int32_t)n,
                                     widths, found, &err);
  PyBuffer_Release(&view);
  return status == HCP_OK ? places_of(found, n) : hcp_py_raise(&err);
}

static PyObject *read_schedule(PyObject *module, PyObject *words) {
  (void)module;
  hcp_section found[HCP_SCHEDULE_SECTION_COUNT];
  hcp_schedule_header header;
  hcp_schedule_sizes sizes;
  Py_buffer view;
  hcp_error err;
  if (numbers_from(words, "words", 1, &view) < 0) return NULL;
  hcp_status status =
      hcp_schedule_read(view.buf, records_in(&view, 1), found, &header, &sizes, &err);
  PyBuffer_Release(&view);
  if (status != HCP_OK) return hcp_py_raise(&err);
  return Py_BuildValue(
      "(NNN)", places_of(found, HCP_SCHEDULE_SECTION_COUNT),
      hcp_py_tuple((const int64_t *)(const void *)&header, HCP_SCHEDULE_HEADER_WORDS),
      hcp_py_tuple((const int64_t *)(const void *)&sizes, HCP_SCHEDULE_SIZE_WORDS));
}

static PyObject *keep_moves(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *given, *flags, *list = NULL;
  Py_buffer moves, kept;
  int64_t count;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "OO:keep_moves", &given, &flags) ||
      numbers_from(given, "moves", 3, &moves) < 0)
    return NULL;
  int64_t *made = PyMem_Malloc((size_t)moves.len + sizeof *made);
  if (made == NULL) {
    PyErr_NoMemory();
  } else if (PyObject_GetBuffer(flags, &kept, PyBUF_SIMPLE) == 0) {
    const hcp_moves all = {moves.buf, records_in(&moves, 3)};
    hcp_status status = hcp_moves_keep(&all, kept.buf, kept.len, made, &count, &err);
    list = status == HCP_OK ? list_of(made, (Py_ssize_t)count, 3) : hcp_py_raise(&err);
    PyBuffer_Release(&kept);
  }
  PyMem_Free(made);
  PyBuffer_Release(&moves);
  return list;
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
    {"packed", packed, METH_VARARGS,
     "Entries as one launch, with room for so many sequences, as words of a table."},
    {"block", block, METH_VARARGS,
     "Exchanges of so many rows of each of some ranks after each other, as words of a table."},
    {"keep_moves", keep_moves, METH_VARARGS,
     "The moves (peer, row, rows) of the rows alone whose byte is not 0."},
    {"read_table", read_table, METH_VARARGS,
     "(first word, end, records) of each section of a table's words."},
    {"read_schedule", read_schedule, METH_O,
     "The same of a schedule's words, with their header and sizes."},
    {"launches", (PyCFunction)(void (*)(void))launches, METH_VARARGS | METH_KEYWORDS,
     "A schedule's launches of a kernel, as words of a table."},
    {"heads", heads, METH_VARARGS,
     "The exchange of heads of a schedule among neighbours that read each other's memory, as words "
     "of a table. shares: of each of them, the first and the end of its query heads, then of its "
     "key-value heads."},
    {"join_entries", (PyCFunction)(void (*)(void))join_entries, METH_VARARGS | METH_KEYWORDS,
     "Entries of one stage as launches, and runs over them, as words of a table."},
    {NULL, NULL, 0, NULL}};

int hcp_py_add_launches(PyObject *module) { return PyModule_AddFunctions(module, functions); }
