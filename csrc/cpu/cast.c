/* cast.c - rows of one dtype, alone or summed, written as another.
 *
 * Elements pass through float32, or float64 where either side is: for each dtype a way
 * into such a sum and a way out of it, instead of one function for each pair. */
#include "dtype.h"
#include "hcp/index.h"
#include "sum.h"

/* Elements of a row begin a sum, are added to it, or are what became of it. */
typedef struct tiles {
  void (*begin)(void *restrict total, const void *restrict row, int64_t n);
  void (*add)(void *restrict total, const void *restrict row, int64_t n);
  void (*end)(void *restrict row, const void *restrict total, int64_t n);
} tiles;

/* NOLINTBEGIN(bugprone-macro-parentheses): a type */
#define TILES(dtype, real)                                                                        \
  static void begin_##dtype##_##real(void *restrict total, const void *restrict row, int64_t n) { \
    const storage_##dtype *restrict from = row;                                                   \
    real *restrict to = total;                                                                    \
    for (int64_t i = 0; i < n; ++i) to[i] = load_##dtype(from[i]);                                \
  }                                                                                               \
  static void add_##dtype##_##real(void *restrict total, const void *restrict row, int64_t n) {   \
    const storage_##dtype *restrict from = row;                                                   \
    real *restrict to = total;                                                                    \
    for (int64_t i = 0; i < n; ++i) to[i] += load_##dtype(from[i]);                               \
  }                                                                                               \
  static void end_##dtype##_##real(void *restrict row, const void *restrict total, int64_t n) {   \
    const real *restrict from = total;                                                            \
    storage_##dtype *restrict to = row;                                                           \
    for (int64_t i = 0; i < n; ++i) to[i] = store_##dtype((wide_##dtype)from[i]);                 \
  }
/* NOLINTEND(bugprone-macro-parentheses) */
TILES(float32, float)
TILES(bfloat16, float)
TILES(float16, float)
TILES(float64, double)
TILES(float32, double)
TILES(bfloat16, double)
TILES(float16, double)

#define OF_TILES(dtype, real) {begin_##dtype##_##real, add_##dtype##_##real, end_##dtype##_##real}

static const tiles in_float[] = {
    [HCP_FLOAT32] = OF_TILES(float32, float),
    [HCP_BFLOAT16] = OF_TILES(bfloat16, float),
    [HCP_FLOAT16] = OF_TILES(float16, float),
};

static const tiles in_double[] = {
    [HCP_FLOAT64] = OF_TILES(float64, double),
    [HCP_FLOAT32] = OF_TILES(float32, double),
    [HCP_BFLOAT16] = OF_TILES(bfloat16, double),
    [HCP_FLOAT16] = OF_TILES(float16, double),
};

/* n elements of a row of the result from number `first` on. */
static void cast_elements(hcp_cast cast, const sum *s, hcp_column out, int64_t row, int64_t first,
                          int64_t n) {
  union {
    float in_float[TILE];
    double in_double[TILE];
  } total;
  int wide = cast.from == HCP_FLOAT64 || cast.to == HCP_FLOAT64;
  const tiles *from = &(wide ? in_double : in_float)[cast.from];
  const tiles *to = &(wide ? in_double : in_float)[cast.to];
  int64_t from_offset = first * hcp_dtype_bytes(cast.from);
  char *target = row_at(out, row) + first * hcp_dtype_bytes(cast.to);
  if (s->on) to->begin(&total, target, n);
  for (int64_t r = 0; r < s->n_records; ++r) {
    const hcp_run *record = &s->records[r];
    char *part_row = row_at(*sum_part(s, record), hcp_run_part_row(record, row));
    /* Not added to zero: a sum of negative zeros stays one. */
    (r == 0 && !s->on ? from->begin : from->add)(&total, part_row + from_offset, n);
  }
  to->end(target, &total, n);
}

void hcp__cast_rows(hcp_cast cast, const sum *s, hcp_column out) {
  int64_t width = out.row_bytes / hcp_dtype_bytes(cast.to);
  int64_t begin = s->records->row, end = begin + s->records->rows;
  for (int64_t row = begin; row < end; ++row)
    for (int64_t first = 0; first < width; first += TILE)
      cast_elements(cast, s, out, row, first, tile_length(width, first));
}
