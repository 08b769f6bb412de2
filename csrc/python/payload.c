/* payload.c - Payload: rows of which each sequence has a number of its own, and their tables. */
#include <string.h>

#include "glue.h"

/* A core Payload, and the Plan that it was made with. */
typedef struct payload_object {
  PyObject_HEAD hcp_payload *payload;
  PyObject *plan_object;
  const hcp_plan *plan;
} payload_object;

static const payload_object *of(PyObject *self) { return (const payload_object *)self; }

static void payload_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  hcp_payload_destroy(((payload_object *)self)->payload);
  Py_XDECREF(((payload_object *)self)->plan_object);
  PyObject_Free(self);
  Py_DECREF(type);
}

/* ---- creation ---- */

static int split_from(const char *name, hcp_split *split) {
  for (int s = 0; s < HCP_SPLIT_COUNT; s++)
    if (strcmp(hcp_split_name((hcp_split)s), name) == 0) {
      *split = (hcp_split)s;
      return 0;
    }
  PyErr_Format(PyExc_ValueError, "split is '%s', expected one of %s", name,
               &(HCP_SPLITS(HCP_PY_LISTED))[2]);
  return -1;
}

/* What a payload is made of, copied. */
typedef struct given {
  int64_t *units, *unit_rows, *counts, *loaded, *computed;
  int32_t *sources;
  hcp_takers takers;
} given;

static void release(const given *g) {
  PyMem_Free(g->units);
  PyMem_Free(g->unit_rows);
  PyMem_Free(g->counts);
  PyMem_Free(g->loaded);
  PyMem_Free(g->computed);
  PyMem_Free(g->sources);
}

static int expect_count(const char *name, Py_ssize_t n, Py_ssize_t expected) {
  if (n == expected) return 0;
  PyErr_Format(PyExc_ValueError, "%s has %zd items, expected %zd", name, n, expected);
  return -1;
}

/* Runs of three words each. */
static int fill_runs(PyObject *list, const char *name, int64_t **words, int64_t *runs) {
  Py_ssize_t n;
  if (hcp_py_int64s(list, name, words, &n) < 0) return -1;
  *runs = n / 3;
  return expect_count(name, n, n / 3 * 3);
}

static int fill_units(given *g, PyObject *units, PyObject *unit_rows, int32_t sequences) {
  Py_ssize_t n, rows, sum = 0;
  if (hcp_py_int64s(units, "units", &g->units, &n) < 0 || expect_count("units", n, sequences) < 0)
    return -1;
  if (unit_rows == Py_None) return 0;
  if (hcp_py_int64s(unit_rows, "unit_rows", &g->unit_rows, &rows) < 0) return -1;
  for (Py_ssize_t i = 0; i < n && sum <= rows; i++) {
    if (g->units[i] < 0 || g->units[i] > rows) break; /* the core names what is below 0 */
    sum += (Py_ssize_t)g->units[i];
  }
  return expect_count("unit_rows", rows, sum);
}

/* takers: (sources, rank, runs of each sequence, runs loaded, runs computed). */
static int fill_takers(given *g, PyObject *takers, int32_t sequences) {
  PyObject *sources, *counts, *loaded, *computed;
  Py_ssize_t n;
  hcp_takers *t = &g->takers;
  if (!PyArg_ParseTuple(takers, "OiOOO:takers", &sources, &t->rank, &counts, &loaded, &computed) ||
      hcp_py_int32s(sources, "sources", &g->sources, &n) < 0 ||
      expect_count("sources", n, sequences) < 0 ||
      hcp_py_int64s(counts, "counts", &g->counts, &n) < 0 ||
      expect_count("counts", n, sequences) < 0 ||
      fill_runs(loaded, "loaded", &g->loaded, &t->loaded_count) < 0 ||
      fill_runs(computed, "computed", &g->computed, &t->computed_count) < 0)
    return -1;
  t->sources = g->sources;
  t->counts = g->counts;
  t->loaded = (const hcp_taker_run *)g->loaded;
  t->computed = (const hcp_taker_run *)g->computed;
  return 0;
}

static PyObject *wrap(PyObject *module, PyObject *plan_object, const hcp_plan *plan,
                      hcp_payload *payload) {
  PyObject *object = hcp_py_new(module, "Payload");
  if (object == NULL) {
    hcp_payload_destroy(payload);
    return NULL;
  }
  payload_object *made = (payload_object *)object;
  made->payload = payload;
  made->plan_object = Py_NewRef(plan_object);
  made->plan = plan;
  return object;
}

PyObject *hcp_py_payload(PyObject *module, PyObject *plan_object, PyObject *args,
                         PyObject *kwargs) {
  static char *keywords[] = {"split", "units", "unit_rows", "takers", NULL};
  PyObject *units, *unit_rows = Py_None, *takers = Py_None;
  const char *name;
  hcp_split split;
  given g = {0};
  hcp_payload *payload = NULL;
  hcp_error err;
  const hcp_plan *plan = hcp_py_plan(module, plan_object);
  if (plan == NULL ||
      !PyArg_ParseTupleAndKeywords(args, kwargs, "sO|OO:payload", keywords, &name, &units,
                                   &unit_rows, &takers) ||
      split_from(name, &split) < 0)
    return NULL;
  if (fill_units(&g, units, unit_rows, plan->n) < 0 ||
      (takers != Py_None && fill_takers(&g, takers, plan->n) < 0)) {
    release(&g);
    return NULL;
  }
  const hcp_takers *taken = takers == Py_None ? NULL : &g.takers;
  HCP_PY_WITHOUT_GIL(plan_object, status,
                     hcp_payload_create(plan, split, g.units, g.unit_rows, taken, &payload, &err));
  release(&g);
  return status == HCP_OK ? wrap(module, plan_object, plan, payload) : hcp_py_raise(&err);
}

/* ---- tables ---- */

static PyObject *table_or_raise(PyObject *self, hcp_status status, hcp_table *table,
                                const hcp_error *err) {
  PyObject *module = PyType_GetModule(Py_TYPE(self));
  return status == HCP_OK ? hcp_py_table(module, table) : hcp_py_raise(err);
}

static PyObject *payload_route(PyObject *self, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"sources", "rank", "of_units", NULL};
  PyObject *source_list, *rank_object;
  int32_t rank, *sources;
  int of_units;
  Py_ssize_t n;
  hcp_table *table = NULL;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOp:route", keywords, &source_list, &rank_object,
                                   &of_units) ||
      hcp_py_int32(rank_object, "rank", &rank) < 0 ||
      hcp_py_int32s(source_list, "sources", &sources, &n) < 0)
    return NULL;
  if (expect_count("sources", n, of(self)->plan->n) < 0) {
    PyMem_Free(sources);
    return NULL;
  }
  HCP_PY_WITHOUT_GIL(
      self, status,
      hcp_payload_route(of(self)->plan, of(self)->payload, of_units, sources, rank, &table, &err));
  PyMem_Free(sources);
  return table_or_raise(self, status, table, &err);
}

static PyObject *payload_to_tokens(PyObject *self, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"micro_batch", "rank", NULL};
  PyObject *micro_batch_object, *rank_object;
  int32_t micro_batch, rank;
  hcp_table *table = NULL;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:route_to_tokens", keywords,
                                   &micro_batch_object, &rank_object) ||
      hcp_py_int32(micro_batch_object, "micro_batch", &micro_batch) < 0 ||
      hcp_py_int32(rank_object, "rank", &rank) < 0)
    return NULL;
  HCP_PY_WITHOUT_GIL(self, status,
                     hcp_payload_route_to_tokens(of(self)->plan, of(self)->payload, micro_batch,
                                                 rank, &table, &err));
  return table_or_raise(self, status, table, &err);
}

static PyObject *payload_measure(PyObject *self, PyObject *args, PyObject *kwargs) {
  static char *keywords[] = {"micro_batch", "rank", "of_units", NULL};
  PyObject *micro_batch_object, *rank_object;
  int32_t micro_batch, rank;
  int of_units;
  hcp_table *table = NULL;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOp:measure", keywords, &micro_batch_object,
                                   &rank_object, &of_units) ||
      hcp_py_int32(micro_batch_object, "micro_batch", &micro_batch) < 0 ||
      hcp_py_int32(rank_object, "rank", &rank) < 0)
    return NULL;
  HCP_PY_WITHOUT_GIL(self, status,
                     hcp_payload_measure(of(self)->plan, of(self)->payload, of_units, micro_batch,
                                         rank, &table, &err));
  return table_or_raise(self, status, table, &err);
}

static PyMethodDef payload_methods[] = {
    {"route", (PyCFunction)(void (*)(void))payload_route, METH_VARARGS | METH_KEYWORDS,
     "Rows from the ranks that loaded the sequences, as words of a table."},
    {"route_to_tokens", (PyCFunction)(void (*)(void))payload_to_tokens,
     METH_VARARGS | METH_KEYWORDS, "Results to the tokens that take them."},
    {"measure", (PyCFunction)(void (*)(void))payload_measure, METH_VARARGS | METH_KEYWORDS,
     "What a rank has in a micro-batch."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot payload_slots[] = {{Py_tp_dealloc, HCP_PY_SLOT(payload_dealloc)},
                                      {Py_tp_methods, payload_methods},
                                      {Py_tp_doc, "Rows of all sequences of a plan, and a rule."},
                                      {0, NULL}};

static PyType_Spec payload_spec = {
    "hcp._core.Payload", sizeof(payload_object), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    payload_slots};

/* ---- units ---- */

static PyObject *check_units(PyObject *module, PyObject *args) {
  PyObject *unit_list, *run_list;
  int64_t *units = NULL, *words = NULL, runs = 0;
  Py_ssize_t n = 0;
  hcp_error err;
  (void)module;
  if (!PyArg_ParseTuple(args, "OO:check_units", &unit_list, &run_list) ||
      hcp_py_int64s(unit_list, "unit_rows", &units, &n) < 0)
    return NULL;
  if (fill_runs(run_list, "runs", &words, &runs) < 0) {
    PyMem_Free(words);
    PyMem_Free(units);
    return NULL;
  }
  HCP_PY_WITHOUT_GIL(
      NULL, status,
      hcp_units_check(units, (int32_t)n, (const hcp_taker_run *)words, (int32_t)runs, &err));
  PyMem_Free(words);
  PyMem_Free(units);
  return status == HCP_OK ? Py_NewRef(Py_None) : hcp_py_raise(&err);
}

static PyMethodDef functions[] = {{"check_units", check_units, METH_VARARGS,
                                   "Raise ValueError where a token takes rows of two units."},
                                  {NULL, NULL, 0, NULL}};

int hcp_py_add_payload(PyObject *module) {
#define TEXT(name, text) text,
  static const char *const splits[] = {HCP_SPLITS(TEXT)};
#undef TEXT
  if (hcp_py_add_type(module, "Payload", &payload_spec) < 0 ||
      hcp_py_add_names(module, "SPLITS", splits, HCP_SPLIT_COUNT) < 0)
    return -1;
  return PyModule_AddFunctions(module, functions);
}
