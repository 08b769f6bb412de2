/* table.c - tables as memory that torch can wrap. */
#include "glue.h"

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

static PyType_Spec table_spec = {"hcp._core._Table", sizeof(table_object), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                 table_slots};

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

int hcp_py_add_table(PyObject *module) { return hcp_py_add_type(module, "_Table", &table_spec); }
