/* nvtx_names.c - a library that NVTX loads by NVTX_INJECTION64_PATH: it prints the names of ranges.
 *
 * The types and numbers below are NVTX's own (nvToolsExt, version 3), of what is used here. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef void (*function_pointer)(void);
typedef const void *(*get_export_table)(uint32_t id);

typedef struct {
  size_t bytes;
  int (*functions_of)(int module, function_pointer ***table, unsigned *size);
} callbacks;

enum { CALLBACKS = 1, MODULE_CORE = 1, RANGE_PUSH_A = 9 };

static int push(const char *name) {
  fprintf(stderr, "NVTX %s\n", name);
  return 0;
}

int InitializeInjectionNvtx2(get_export_table get) {
  const callbacks *of = get(CALLBACKS);
  function_pointer **table = NULL;
  unsigned size = 0;
  if (of == NULL || !of->functions_of(MODULE_CORE, &table, &size) || size <= RANGE_PUSH_A) return 0;
  *table[RANGE_PUSH_A] = (function_pointer)push;
  return 1;
}
