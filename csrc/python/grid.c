/* grid.c - Grid: the ranks that form tp, pp, cp, dp and other groups for a job layout. */
#include <string.h>

#include "glue.h"

typedef struct grid_object {
  PyObject_HEAD hcp_grid grid;
  char order[32];
} grid_object;

static const hcp_grid *grid_of(PyObject *self) { return &((grid_object *)self)->grid; }

static void write_order(const hcp_grid *grid, char *order) {
  order[0] = '\0';
  for (int i = 0; i < HCP_DIMENSION_COUNT; i++) {
    if (i > 0) strcat(order, "-");
    strcat(order, hcp_dimension_name(grid->order[i]));
  }
}

static const char *order_of(PyObject *given) {
  if (given == NULL) return "tp-cp-dp-pp";
  if (PyUnicode_Check(given)) return PyUnicode_AsUTF8AndSize(given, NULL);
  PyErr_Format(PyExc_ValueError, "order is %R, expected text such as 'tp-cp-dp-pp'", given);
  return NULL;
}

static PyObject *grid_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
#define KEYWORD(name, text) text,
#define ADDRESS(name, text) , &given[HCP_DIMENSION_##name]
#define SIZE(name, text)                                                                 \
  if (given[HCP_DIMENSION_##name] != NULL &&                                             \
      hcp_py_int32(given[HCP_DIMENSION_##name], text, &sizes[HCP_DIMENSION_##name]) < 0) \
    return NULL;
  static char *keywords[] = {HCP_DIMENSIONS(KEYWORD) "order", NULL};
  PyObject *given[HCP_DIMENSION_COUNT] = {NULL};
  int32_t sizes[HCP_DIMENSION_COUNT] = {1, 1, 1, 1};
  PyObject *order_object = NULL;
  hcp_grid grid;
  hcp_error err;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOOO:Grid", keywords HCP_DIMENSIONS(ADDRESS),
                                   &order_object))
    return NULL;
  HCP_DIMENSIONS(SIZE)
#undef KEYWORD
#undef ADDRESS
#undef SIZE
  const char *order = order_of(order_object);
  if (order == NULL) return NULL;
  if (hcp_grid_init(sizes, order, &grid, &err) != HCP_OK) return hcp_py_raise(&err);
  PyObject *self = PyType_GenericAlloc(type, 0);
  if (self == NULL) return NULL;
  ((grid_object *)self)->grid = grid;
  write_order(&grid, ((grid_object *)self)->order);
  return self;
}

static void grid_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

static PyObject *grid_repr(PyObject *self) {
  const int32_t *sizes = grid_of(self)->sizes;
  return PyUnicode_FromFormat("Grid(tp=%d, cp=%d, dp=%d, pp=%d, order='%s')",
                              (int)sizes[HCP_DIMENSION_TP], (int)sizes[HCP_DIMENSION_CP],
                              (int)sizes[HCP_DIMENSION_DP], (int)sizes[HCP_DIMENSION_PP],
                              ((grid_object *)self)->order);
}

static int grids_equal(const hcp_grid *a, const hcp_grid *b) {
  for (int i = 0; i < HCP_DIMENSION_COUNT; i++)
    if (a->sizes[i] != b->sizes[i] || a->order[i] != b->order[i]) return 0;
  return 1;
}

static PyObject *grid_richcompare(PyObject *self, PyObject *other, int op) {
  if (Py_TYPE(self) != Py_TYPE(other) || (op != Py_EQ && op != Py_NE))
    return Py_NewRef(Py_NotImplemented);
  return PyBool_FromLong(grids_equal(grid_of(self), grid_of(other)) == (op == Py_EQ));
}

static Py_hash_t grid_hash(PyObject *self) {
  const hcp_grid *grid = grid_of(self);
  size_t hash = 0;
  for (int i = 0; i < HCP_DIMENSION_COUNT; i++)
    hash = (hash * 1000003 + (size_t)grid->sizes[i]) * 1000003 + (size_t)grid->order[i];
  return hash == (size_t)-1 ? -2 : (Py_hash_t)hash;
}

/* ---- attributes ---- */

static PyObject *get_ranks(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromLong(grid_of(self)->ranks);
}

static PyObject *get_sizes(PyObject *self, void *unused) {
  (void)unused;
#define FORMAT(name, text) "si"
#define ITEM(name, text) , text, (int)grid_of(self)->sizes[HCP_DIMENSION_##name]
  return Py_BuildValue("{" HCP_DIMENSIONS(FORMAT) "}" HCP_DIMENSIONS(ITEM));
#undef FORMAT
#undef ITEM
}

static PyObject *get_order(PyObject *self, void *unused) {
  (void)unused;
  return PyUnicode_FromString(((grid_object *)self)->order);
}

static PyGetSetDef grid_getset[] = {
    {"ranks", get_ranks, NULL, "tp * cp * dp * pp.", NULL},
    {"sizes", get_sizes, NULL, "The size of each dimension, by name.", NULL},
    {"order", get_order, NULL, "The dimensions, fastest-varying first.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

/* ---- methods ---- */

static PyObject *list_of_ranks(const int32_t *ranks, int32_t n) {
  PyObject *list = PyList_New(n);
  if (list == NULL) return NULL;
  for (int32_t i = 0; i < n; i++) {
    PyObject *rank = PyLong_FromLong(ranks[i]);
    if (rank == NULL || PyList_SetItem(list, i, rank) < 0) goto fail_rank;
  }
  return list;

fail_rank:
  Py_DECREF(list);
  return NULL;
}

static PyObject *list_of_groups(const int32_t *ranks, int32_t count, int32_t size) {
  PyObject *groups = PyList_New(count);
  if (groups == NULL) return NULL;
  for (int32_t i = 0; i < count; i++) {
    PyObject *group = list_of_ranks(ranks + (size_t)i * (size_t)size, size);
    if (group == NULL || PyList_SetItem(groups, i, group) < 0) goto fail_group;
  }
  return groups;

fail_group:
  Py_DECREF(groups);
  return NULL;
}

static PyObject *grid_groups(PyObject *self, PyObject *args) {
  const char *role;
  PyObject *groups = NULL;
  int32_t count, size;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "s:groups", &role)) return NULL;
  int32_t *ranks = PyMem_Malloc((size_t)grid_of(self)->ranks * sizeof *ranks);
  if (ranks == NULL) return PyErr_NoMemory();
  HCP_PY_WITHOUT_GIL(self, status,
                     hcp_grid_groups(grid_of(self), role, ranks, &count, &size, &err));
  if (status == HCP_OK)
    groups = list_of_groups(ranks, count, size);
  else
    hcp_py_raise(&err);
  PyMem_Free(ranks);
  return groups;
}

static PyObject *grid_shares(PyObject *self, PyObject *args) {
  PyObject *other;
  const char *role;
  int32_t same;
  hcp_error err;
  if (!PyArg_ParseTuple(args, "O!s:shares", Py_TYPE(self), &other, &role)) return NULL;
  HCP_PY_WITHOUT_GIL(self, status,
                     hcp_grid_shares(grid_of(self), grid_of(other), role, &same, &err));
  if (status != HCP_OK) return hcp_py_raise(&err);
  return PyBool_FromLong(same);
}

static PyMethodDef grid_methods[] = {
    {"groups", grid_groups, METH_VARARGS,
     "groups($self, role, /)\n--\n\n"
     "Rank lists of every group of a role such as 'dp_cp'; both levels ascend."},
    {"shares", grid_shares, METH_VARARGS,
     "shares($self, other, role, /)\n--\n\n"
     "Whether another grid of the same ranks forms the same groups in a role."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot grid_slots[] = {{Py_tp_new, HCP_PY_SLOT(grid_new)},
                                   {Py_tp_dealloc, HCP_PY_SLOT(grid_dealloc)},
                                   {Py_tp_repr, HCP_PY_SLOT(grid_repr)},
                                   {Py_tp_hash, HCP_PY_SLOT(grid_hash)},
                                   {Py_tp_richcompare, HCP_PY_SLOT(grid_richcompare)},
                                   {Py_tp_getset, grid_getset},
                                   {Py_tp_methods, grid_methods},
                                   {Py_tp_doc,
                                    "Grid(*, tp=1, cp=1, dp=1, pp=1, order='tp-cp-dp-pp')\n--\n\n"
                                    "Ranks of a job as a box of dimensions. Immutable."},
                                   {0, NULL}};

static PyType_Spec grid_spec = {"hcp._core.Grid", sizeof(grid_object), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, grid_slots};

int hcp_py_add_grid(PyObject *module) { return hcp_py_add_type(module, "Grid", &grid_spec); }
