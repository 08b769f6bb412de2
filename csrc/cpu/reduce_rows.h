/* reduce_rows.h - the rows of one run, for one DTYPE: included once for each. */

/* Not added to zero: a sum of negative zeros stays one. */
static void OF(sum_begin)(WIDE *restrict total, const STORAGE *restrict row, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] = OF(load)(row[i]);
}

static void OF(sum_add)(WIDE *restrict total, const STORAGE *restrict row, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] += OF(load)(row[i]);
}

static void OF(sum_end)(STORAGE *restrict out, const WIDE *restrict total, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = OF(store)(total[i]);
}

static const STORAGE *OF(sum_row)(const sum *s, int64_t record, int64_t row) {
  const hcp_run *run = &s->records[record];
  return (const STORAGE *)(const void *)row_at(*sum_part(s, run), hcp_run_part_row(run, row));
}

/* Elements [first, first + n) of a row, over all records. */
static void OF(sum_elements)(const sum *s, int64_t row, int64_t first, int64_t n, WIDE *total) {
  OF(sum_begin)(total, OF(sum_row)(s, 0, row) + first, n);
  for (int64_t r = 1; r < s->n_records; ++r) OF(sum_add)(total, OF(sum_row)(s, r, row) + first, n);
}

/* `width` elements of a row from `from` on. */
static void OF(reduce_row)(const sum *s, int64_t row, int64_t from, STORAGE *out, int64_t width) {
  WIDE total[TILE];
  for (int64_t first = 0; first < width; first += TILE) {
    int64_t n = tile_length(width, first);
    OF(sum_elements)(s, row, from + first, n, total);
    OF(sum_end)(out + first, total, n);
  }
}

static void OF(reduce_rows)(const sum *s, hcp_column out) {
  int64_t width = out.row_bytes / (int64_t)sizeof(STORAGE);
  int64_t begin = s->records->row, end = begin + s->records->rows;
  for (int64_t row = begin; row < end; ++row)
    OF(reduce_row)(s, row, 0, (STORAGE *)(void *)row_at(out, row), width);
}

/* ---- turned ---- */

/* n pairs from pair `first` on. The elements of a tile stand as they do in a head
 * of TILE pairs. `interleaved` and `inverse` are constants where it is called. */
static inline void OF(turn_tile)(WIDE *restrict tile, const WIDE *restrict cos,
                                 const WIDE *restrict sin, int64_t first, int64_t n, int64_t pairs,
                                 int interleaved, int inverse) {
  const WIDE *cos_x = cos + hcp_pair_first(first, interleaved);
  const WIDE *sin_x = sin + hcp_pair_first(first, interleaved);
  const WIDE *cos_y = cos + hcp_pair_second(first, pairs, interleaved);
  const WIDE *sin_y = sin + hcp_pair_second(first, pairs, interleaved);
  for (int64_t p = 0; p < n; ++p) {
    int64_t at = hcp_pair_first(p, interleaved);
    OF(turn)(&tile[at], &tile[hcp_pair_second(p, TILE, interleaved)], cos_x[at], sin_x[at],
             cos_y[at], sin_y[at], inverse);
  }
}

static void OF(turn_pairs)(WIDE *tile, const hcp_rotation *r, int64_t row, int64_t first,
                           int64_t n) {
  const WIDE *cos = (const WIDE *)r->cos + row * 2 * r->pairs;
  const WIDE *sin = (const WIDE *)r->sin + row * 2 * r->pairs;
  if (r->interleaved && r->inverse)
    OF(turn_tile)(tile, cos, sin, first, n, r->pairs, 1, 1);
  else if (r->interleaved)
    OF(turn_tile)(tile, cos, sin, first, n, r->pairs, 1, 0);
  else if (r->inverse)
    OF(turn_tile)(tile, cos, sin, first, n, r->pairs, 0, 1);
  else
    OF(turn_tile)(tile, cos, sin, first, n, r->pairs, 0, 0);
}

/* A head whose elements start at `from` in the rows of the records. */
static void OF(turn_head)(const sum *s, const hcp_rotation *r, int64_t row, int64_t from,
                          STORAGE *out) {
  WIDE tile[2 * TILE];
  for (int64_t first = 0; first < r->pairs; first += TILE) {
    int64_t n = tile_length(r->pairs, first);
    int64_t x = hcp_pair_first(first, r->interleaved), y = first + r->pairs;
    /* Interleaved elements are one run of both kinds, else they are two runs. */
    OF(sum_elements)(s, row, from + x, r->interleaved ? 2 * n : n, tile);
    if (!r->interleaved) OF(sum_elements)(s, row, from + y, n, tile + TILE);
    OF(turn_pairs)(tile, r, row, first, n);
    OF(sum_end)(out + x, tile, r->interleaved ? 2 * n : n);
    if (!r->interleaved) OF(sum_end)(out + y, tile + TILE, n);
  }
  int64_t turned = 2 * r->pairs;
  OF(reduce_row)(s, row, from + turned, out + turned, r->head_dim - turned);
}

static void OF(turn_rows)(const sum *s, const hcp_rotation *r, int64_t head_stride, int64_t begin,
                          int64_t end, hcp_column out) {
  int64_t heads = out.row_bytes / (int64_t)sizeof(STORAGE) / r->head_dim;
  for (int64_t row = begin; row < end; ++row) {
    STORAGE *target = (STORAGE *)(void *)row_at(out, row);
    for (int64_t h = 0; h < heads; ++h)
      OF(turn_head)(s, r, row, h * head_stride, target + h * r->head_dim);
  }
}
