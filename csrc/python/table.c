/* table.c - tables as memory that torch can wrap. */
#include "glue.h"
#include "hcp/link.h"

typedef struct table_object {
  PyObject_HEAD hcp_table *table;
} table_object;

static void table_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  hcp_table_destroy(((table_object *)self)->table);
  PyObject_Free(self);
  Py_DECREF(type);
}

static PyType_Slot table_slots[] = {{Py_tp_dealloc, HCP_PY_SLOT(table_dealloc)},
                                    {Py_tp_doc, "Owner of a table's memory."},
                                    {0, NULL}};

static PyType_Spec table_spec = {
    "hcp._core._Table", sizeof(table_object), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, table_slots};

PyObject *hcp_py_table(PyObject *module, hcp_table *table) {
  PyObject *owner = hcp_py_new(module, "_Table");
  if (owner == NULL) {
    hcp_table_destroy(table);
    return NULL;
  }
  ((table_object *)owner)->table = table;
  PyObject *words =
      hcp_py_view(module, owner, table->words, (Py_ssize_t)table->word_count, 1, 'q', 1);
  Py_DECREF(owner);
  return words;
}

PyObject *hcp_py_tuple(const int64_t *values, Py_ssize_t n) {
  PyObject *tuple = PyTuple_New(n);
  for (Py_ssize_t i = 0; tuple != NULL && i < n; i++) {
    PyObject *value = PyLong_FromLongLong(values[i]);
    if (value == NULL || PyTuple_SetItem(tuple, i, value) < 0) {
      Py_DECREF(tuple);
      return NULL;
    }
  }
  return tuple;
}

/* Sections as ((name, words per record), ...), in the order of their numbers. */
static PyObject *sections_tuple(const char *const *names, const int *widths, Py_ssize_t n) {
  PyObject *tuple = PyTuple_New(n);
  for (Py_ssize_t i = 0; tuple != NULL && i < n; i++) {
    PyObject *section = Py_BuildValue("(si)", names[i], widths[i]);
    if (section == NULL || PyTuple_SetItem(tuple, i, section) < 0) Py_CLEAR(tuple);
  }
  return tuple;
}

int hcp_py_add_table(PyObject *module) {
#define NAME(name, width) #name,
#define WIDTH(name, width) width,
  static const char *const route_names[] = {HCP_ROUTE_SECTIONS(NAME)};
  static const int route_widths[] = {HCP_ROUTE_SECTIONS(WIDTH)};
  static const char *const states_names[] = {HCP_STATES_SECTIONS(NAME)};
  static const int states_widths[] = {HCP_STATES_SECTIONS(WIDTH)};
  static const char *const cross_names[] = {HCP_CROSS_SECTIONS(NAME)};
  static const int cross_widths[] = {HCP_CROSS_SECTIONS(WIDTH)};
  static const char *const trees_names[] = {HCP_TREES_SECTIONS(NAME)};
  static const int trees_widths[] = {HCP_TREES_SECTIONS(WIDTH)};
  static const char *const tree_mask_names[] = {HCP_TREE_MASK_SECTIONS(NAME)};
  static const int tree_mask_widths[] = {HCP_TREE_MASK_SECTIONS(WIDTH)};
  static const char *const payload_names[] = {HCP_PAYLOAD_SECTIONS(NAME)};
  static const int payload_widths[] = {HCP_PAYLOAD_SECTIONS(WIDTH)};
  static const char *const fixed_names[] = {HCP_FIXED_SECTIONS(NAME)};
  static const int fixed_widths[] = {HCP_FIXED_SECTIONS(WIDTH)};
  static const char *const packed_names[] = {HCP_PACKED_SECTIONS(NAME)};
  static const int packed_widths[] = {HCP_PACKED_SECTIONS(WIDTH)};
  static const char *const block_names[] = {HCP_BLOCK_SECTIONS(NAME)};
  static const int block_widths[] = {HCP_BLOCK_SECTIONS(WIDTH)};
  static const char *const mailbox_names[] = {HCP_MAILBOX_SECTIONS(NAME)};
  static const int mailbox_widths[] = {HCP_MAILBOX_SECTIONS(WIDTH)};
  static const char *const link_names[] = {HCP_LINK_SECTIONS(NAME)};
  static const int link_widths[] = {HCP_LINK_SECTIONS(WIDTH)};
  static const char *const launches_names[] = {HCP_LAUNCHES_SECTIONS(NAME)};
  static const int launches_widths[] = {HCP_LAUNCHES_SECTIONS(WIDTH)};
  static const char *const heads_names[] = {HCP_HEADS_SECTIONS(NAME)};
  static const int heads_widths[] = {HCP_HEADS_SECTIONS(WIDTH)};
  static const char *const schedule_names[] = {HCP_SCHEDULE_SECTIONS(NAME)};
  static const int schedule_widths[] = {HCP_SCHEDULE_SECTIONS(WIDTH)};
#define FIELD(name) #name,
  static const char *const header_names[] = {HCP_SCHEDULE_HEADER(FIELD)};
  static const char *const size_names[] = {HCP_SCHEDULE_SIZES_OF(FIELD)};
  static const char *const packed_size_names[] = {HCP_PACKED_SIZES_OF(FIELD)};
#undef NAME
#undef WIDTH
#undef FIELD
  if (hcp_py_add_type(module, "_Table", &table_spec) < 0 ||
      hcp_py_add_owned(module, "ROUTE_SECTIONS",
                       sections_tuple(route_names, route_widths, HCP_ROUTE_SECTION_COUNT)) < 0 ||
      hcp_py_add_owned(module, "STATES_SECTIONS",
                       sections_tuple(states_names, states_widths, HCP_STATES_SECTION_COUNT)) < 0 ||
      hcp_py_add_owned(module, "CROSS_SECTIONS",
                       sections_tuple(cross_names, cross_widths, HCP_CROSS_SECTION_COUNT)) < 0 ||
      hcp_py_add_owned(module, "PAYLOAD_SECTIONS",
                       sections_tuple(payload_names, payload_widths, HCP_PAYLOAD_SECTION_COUNT)) <
          0 ||
      hcp_py_add_owned(module, "FIXED_SECTIONS",
                       sections_tuple(fixed_names, fixed_widths, HCP_FIXED_SECTION_COUNT)) < 0)
    return -1;
  if (hcp_py_add_owned(module, "PACKED_SECTIONS",
                       sections_tuple(packed_names, packed_widths, HCP_PACKED_SECTION_COUNT)) < 0 ||
      hcp_py_add_owned(module, "BLOCK_SECTIONS",
                       sections_tuple(block_names, block_widths, HCP_BLOCK_SECTION_COUNT)) < 0 ||
      hcp_py_add_names(module, "PACKED_SIZES", packed_size_names,
                       sizeof packed_size_names / sizeof *packed_size_names) < 0 ||
      hcp_py_add_names(module, "SCHEDULE_SIZES", size_names, HCP_SCHEDULE_SIZE_WORDS) < 0)
    return -1;
  if (hcp_py_add_owned(module, "MAILBOX_SECTIONS",
                       sections_tuple(mailbox_names, mailbox_widths, HCP_MAILBOX_SECTION_COUNT)) <
          0 ||
      hcp_py_add_owned(module, "TREES_SECTIONS",
                       sections_tuple(trees_names, trees_widths, HCP_TREES_SECTION_COUNT)) < 0 ||
      hcp_py_add_owned(
          module, "TREE_MASK_SECTIONS",
          sections_tuple(tree_mask_names, tree_mask_widths, HCP_TREE_MASK_SECTION_COUNT)) < 0 ||
      hcp_py_add_owned(module, "LINK_SECTIONS",
                       sections_tuple(link_names, link_widths, HCP_LINK_SECTION_COUNT)) < 0)
    return -1;
  if (hcp_py_add_owned(
          module, "LAUNCHES_SECTIONS",
          sections_tuple(launches_names, launches_widths, HCP_LAUNCHES_SECTION_COUNT)) < 0 ||
      hcp_py_add_owned(module, "HEADS_SECTIONS",
                       sections_tuple(heads_names, heads_widths, HCP_HEADS_SECTION_COUNT)) < 0)
    return -1;
  if (hcp_py_add_names(module, "SCHEDULE_HEADER", header_names, HCP_SCHEDULE_HEADER_WORDS) < 0)
    return -1;
  return hcp_py_add_owned(
      module, "SCHEDULE_SECTIONS",
      sections_tuple(schedule_names, schedule_widths, HCP_SCHEDULE_SECTION_COUNT));
}
