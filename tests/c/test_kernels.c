/* test_kernels.c - tables refused, rows gathered, merged and summed. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "hcp/index.h"
#include "hcp/kernels.h"

#define COUNT(array) ((int64_t)(sizeof(array) / sizeof((array)[0])))

/* ---- Tables -------------------------------------------------------------- */

static void expect_segments(hcp_segment segment, int64_t rows, int64_t out_rows,
                            const char *message) {
  hcp_error err = {HCP_OK, ""};
  hcp_status status = hcp_check_segments(&segment, 1, rows, out_rows, &err);
  CHECK_INT(status, message == NULL ? HCP_OK : HCP_INVALID);
  CHECK_INT(hcp_check_segments(&segment, 1, rows, out_rows, NULL), status);
  if (message != NULL) CHECK_TEXT(err.message, message);
}

static void test_segments(void) {
  expect_segments((hcp_segment){0, 4}, 4, 4, NULL);
  expect_segments((hcp_segment){4, 0}, 4, 0, NULL);
  expect_segments((hcp_segment){-1, 9}, 4, 9, NULL);
  expect_segments((hcp_segment){1, 4}, 4, 4, "segments[0] is 4 rows from row 1, expected inside");
  expect_segments((hcp_segment){0, 5}, 4, 5, "segments[0] is 5 rows from row 0, expected inside");
  expect_segments((hcp_segment){INT64_MAX, 1}, 4, 1, "expected inside the source's 4 rows");
  expect_segments((hcp_segment){1, INT64_MAX}, 4, 1, "expected inside the source's 4 rows");
  expect_segments((hcp_segment){-2, 1}, 4, 1, "segments[0].row is -2, expected >= 0, or -1");
  expect_segments((hcp_segment){0, -1}, 4, 1, "segments[0].rows is -1, expected >= 0");
  expect_segments((hcp_segment){INT64_MIN, INT64_MIN}, 4, 1, "expected >= 0");
  expect_segments((hcp_segment){0, 3}, 4, 4, "segments have 3 rows, expected rows = 4");
  expect_segments((hcp_segment){0, 3}, 4, 2, "segments[0 .. 0] have more rows than rows = 2");
}

static void test_segments_whose_sum_overflows(void) {
  hcp_segment segments[] = {{-1, INT64_MAX}, {-1, INT64_MAX}, {-1, 6}};
  hcp_error err;
  CHECK_INT(hcp_check_segments(segments, COUNT(segments), 0, 4, &err), HCP_INVALID);
  CHECK_TEXT(err.message, "more rows than rows = 4");
  CHECK_INT(hcp_check_segments(NULL, 0, 0, 0, &err), HCP_OK);
}

static void expect_runs(hcp_run first, hcp_run second, const char *message) {
  hcp_run runs[] = {first, second};
  int64_t part_rows[] = {4, 2};
  hcp_error err = {HCP_OK, ""};
  hcp_status status = hcp_check_runs(runs, COUNT(runs), part_rows, COUNT(part_rows), 8, &err);
  CHECK_INT(status, message == NULL ? HCP_OK : HCP_INVALID);
  if (message != NULL) CHECK_TEXT(err.message, message);
}

static void test_runs(void) {
  hcp_run good = {0, 2, 1, 0};
  expect_runs(good, (hcp_run){0, 2, 0, 2}, NULL);
  expect_runs(good, (hcp_run){2, 4, 0, 0}, NULL);
  expect_runs(good, (hcp_run){6, 2, 0, 2}, NULL);
  expect_runs(good, (hcp_run){7, 2, 0, 2}, "runs[1] is 2 rows from row 7, expected inside");
  expect_runs(good, (hcp_run){1, INT64_MAX, 0, 0}, "expected inside the result's 8 rows");
  expect_runs(good, (hcp_run){INT64_MAX, 2, 0, 0}, "expected inside the result's 8 rows");
  expect_runs(good, (hcp_run){-1, 2, 0, 0}, "runs[1] is 2 rows from row -1");
  expect_runs(good, (hcp_run){2, 0, 0, 0}, "runs[1].rows is 0, expected >= 1");
  expect_runs(good, (hcp_run){2, 2, 2, 0}, "runs[1].part is 2, expected >= 0 and < 2 parts");
  expect_runs(good, (hcp_run){2, 2, -1, 0}, "runs[1].part is -1, expected >= 0");
  expect_runs(good, (hcp_run){2, 2, 1, 1}, "runs[1] takes 2 rows from row 1 of part 1");
  expect_runs(good, (hcp_run){2, 3, 1, 0}, "runs[1] takes 3 rows from row 0 of part 1");
  expect_runs(good, (hcp_run){2, 2, 0, -1}, "runs[1] takes 2 rows from row -1 of part 0");
  expect_runs(good, (hcp_run){2, 2, 0, INT64_MAX}, "of part 0, expected inside its 4 rows");
  expect_runs(good, (hcp_run){1, 2, 0, 0}, "runs[1] is 2 rows from row 1, expected the same rows");
  expect_runs(good, (hcp_run){0, 1, 0, 0}, "runs[1] is 1 rows from row 0, expected the same rows");
  expect_runs((hcp_run){4, 1, 0, 0}, good, "runs[1] is 2 rows from row 0, expected the same rows");
}

static void test_records_of_equal_rows_are_one_run(void) {
  hcp_run runs[] = {{0, 2, 0, 0}, {0, 2, 1, 0}, {2, 1, 0, 0}, {3, 1, 0, 0}};
  CHECK_INT(hcp_run_end(runs, COUNT(runs), 0), 2);
  CHECK_INT(hcp_run_end(runs, COUNT(runs), 2), 3);
  CHECK_INT(hcp_run_end(runs, COUNT(runs), 3), 4);
}

static void test_the_place_of_a_row_is_the_last_that_starts_at_or_before_it(void) {
  const int64_t first_rows[] = {3, 5, 5, 9, INT64_MAX};
  const int32_t short_rows[] = {3, 5, 5, 9, INT32_MAX};
  for (int32_t n = 1; n <= COUNT(first_rows); n++)
    for (int64_t row = 0; row < 12; row++) {
      int32_t expected = 0;
      for (int32_t i = 0; i < n; i++)
        if (first_rows[i] <= row) expected = i;
      CHECK_INT(hcp_place_of_row(first_rows, n, row), expected);
      CHECK_INT(hcp_place_of_row_32(short_rows, n, (int32_t)row), expected);
    }
  CHECK_INT(hcp_place_of_row(first_rows, COUNT(first_rows), INT64_MAX), 4);
  CHECK_INT(hcp_place_of_row_32(short_rows, COUNT(short_rows), INT32_MAX), 4);
}

static void test_a_row_is_in_its_piece(void) {
  for (int64_t rows = 1; rows < 40; rows++) {
    CHECK_INT(hcp_piece_start(rows, 0), 0);
    CHECK_INT(hcp_piece_start(rows, HCP_PIECES), rows);
    for (int64_t row = 0; row < rows; row++) {
      int32_t piece = hcp_piece_of_row(rows, row);
      CHECK(hcp_piece_start(rows, piece) <= row && row < hcp_piece_start(rows, piece + 1));
    }
  }
}

/* ---- Gathers ------------------------------------------------------------- */

static hcp_column bytes_column(char *data, int64_t stride, int64_t width) {
  return (hcp_column){data, stride, width};
}

static void test_pack_and_unpack(void) {
  char first[] = "aA.bB.cC.dD.", second[] = "0123"; /* rows of 3 with 2 used, rows of 1 */
  hcp_column sources[] = {bytes_column(first, 3, 2), bytes_column(NULL, 0, 0),
                          bytes_column(second, 1, 1)};
  hcp_segment segments[] = {{2, 2}, {-1, 1}, {0, 0}, {1, 3}};
  char out[6 * 4 + 1] = "........................";
  hcp_cpu_pack(NULL, sources, 3, segments, COUNT(segments), bytes_column(out, 4, 3));
  CHECK_INT(memcmp(out, "cC2.dD3.\0\0\0.bB1.cC2.dD3.", 24), 0);

  char left[4] = "....", right[] = "..";
  hcp_column outs[] = {bytes_column(left, 2, 2), bytes_column(right, 1, 1)};
  hcp_segment back[] = {{5, 1}, {0, 1}};
  hcp_cpu_unpack(NULL, bytes_column(out, 4, 3), back, COUNT(back), outs, 2);
  CHECK_INT(memcmp(left, "dDcC", 4), 0);
  CHECK_TEXT(right, "32");
}

static void test_gathers_of_nothing(void) {
  hcp_column nothing = bytes_column(NULL, 0, 0);
  hcp_segment zeros = {-1, 5};
  hcp_cpu_pack(NULL, &nothing, 1, &zeros, 1, nothing);
  hcp_column no_rows = bytes_column(NULL, 4, 4);
  hcp_segment empty = {0, 0};
  hcp_cpu_pack(NULL, &no_rows, 1, &empty, 1, no_rows);
  hcp_cpu_unpack(NULL, no_rows, &empty, 1, &no_rows, 1);
  hcp_cpu_pack(NULL, &no_rows, 1, NULL, 0, no_rows);
}

/* ---- Sums ---------------------------------------------------------------- */

static void test_reduce(void) {
  float a[] = {1, 2, 3, 4}, b[] = {10, 20}, out[8];
  hcp_column parts[] = {{a, 8, 8}, {b, 8, 8}};
  hcp_run runs[] = {{1, 1, 0, 1}, {1, 1, 1, 0}, {2, 1, 1, 0}};
  for (int i = 0; i < 8; ++i) out[i] = NAN;
  hcp_cpu_reduce(&(hcp_sum){HCP_FLOAT32, parts, 1, runs, COUNT(runs), 4}, NULL,
                 (hcp_column){out, 8, 8});
  float expected[] = {0, 0, 13, 24, 10, 20, 0, 0};
  for (int i = 0; i < 8; ++i) CHECK_NEAR(out[i], expected[i], 0);
}

static void test_reduce_columns_into_strided_rows(void) {
  double a[] = {1, 2}, b[] = {3, 4, 5, 6}, out[8];
  hcp_column parts[] = {{a, 8, 8}, {b, 16, 16}, {a, 8, 8}, {b, 16, 16}};
  hcp_run runs[] = {{0, 2, 0, 0}, {0, 2, 1, 0}};
  for (int i = 0; i < 8; ++i) out[i] = -7;
  hcp_cpu_reduce(&(hcp_sum){HCP_FLOAT64, parts, 2, runs, COUNT(runs), 2}, NULL,
                 (hcp_column){out, 32, 24});
  double expected[] = {2, 6, 8, -7, 4, 10, 12, -7};
  for (int i = 0; i < 8; ++i) CHECK_NEAR(out[i], expected[i], 0);
}

/* Sums value and zero, which loads and stores it. */
static uint16_t through(hcp_dtype dtype, uint16_t value) {
  uint16_t zero = value & 0x8000u, out = 0x1234;
  hcp_column parts[] = {{&value, 2, 2}, {&zero, 2, 2}};
  hcp_run runs[] = {{0, 1, 0, 0}, {0, 1, 1, 0}};
  hcp_cpu_reduce(&(hcp_sum){dtype, parts, 1, runs, COUNT(runs), 1}, NULL, (hcp_column){&out, 2, 2});
  return out;
}

static int is_nan_16(hcp_dtype dtype, uint16_t value) {
  return (value & 0x7fff) > (dtype == HCP_FLOAT16 ? 0x7c00 : 0x7f80);
}

static void test_every_16_bit_value_comes_back(void) {
  hcp_dtype dtypes[] = {HCP_BFLOAT16, HCP_FLOAT16};
  for (int d = 0; d < 2; ++d)
    for (uint32_t value = 0; value <= UINT16_MAX; ++value) {
      uint16_t back = through(dtypes[d], (uint16_t)value);
      if (is_nan_16(dtypes[d], (uint16_t)value))
        CHECK(is_nan_16(dtypes[d], back));
      else
        CHECK_INT(back, value);
    }
}

/* a + b in a dtype. */
static uint16_t sum_16(hcp_dtype dtype, uint16_t a, uint16_t b) {
  uint16_t out = 0x1234;
  hcp_column parts[] = {{&a, 2, 2}, {&b, 2, 2}};
  hcp_run runs[] = {{0, 1, 0, 0}, {0, 1, 1, 0}};
  hcp_cpu_reduce(&(hcp_sum){dtype, parts, 1, runs, COUNT(runs), 1}, NULL, (hcp_column){&out, 2, 2});
  return out;
}

static void test_ties_round_to_even(void) {
  /* 1 and 1 + 1 bit, each with half a bit more; the largest number, with half a bit more. */
  CHECK_INT(sum_16(HCP_BFLOAT16, 0x3f80, 0x3b80), 0x3f80);
  CHECK_INT(sum_16(HCP_BFLOAT16, 0x3f81, 0x3b80), 0x3f82);
  CHECK_INT(sum_16(HCP_BFLOAT16, 0x7f7f, 0x7b00), 0x7f80);
  CHECK_INT(sum_16(HCP_FLOAT16, 0x3c00, 0x1000), 0x3c00);
  CHECK_INT(sum_16(HCP_FLOAT16, 0x3c01, 0x1000), 0x3c02);
  CHECK_INT(sum_16(HCP_FLOAT16, 0x7bff, 0x4c00), 0x7c00);
  CHECK_INT(sum_16(HCP_FLOAT16, 0x7bff, 0x4bff), 0x7bff);
}

static void test_a_sum_is_rounded_once(void) {
  uint16_t values[] = {0x4380, 0x3f80, 0x3f80}, out; /* 256 + 1 + 1, where 257 is no bfloat16 */
  hcp_column part = {values, 2, 2};
  hcp_run runs[] = {{0, 1, 0, 0}, {0, 1, 0, 1}, {0, 1, 0, 2}};
  hcp_cpu_reduce(&(hcp_sum){HCP_BFLOAT16, &part, 1, runs, COUNT(runs), 1}, NULL,
                 (hcp_column){&out, 2, 2});
  CHECK_INT(out, 0x4381);
}

/* ---- Casts --------------------------------------------------------------- */

/* 300 elements are more than one TILE. */
enum { CAST_ROWS = 3, CAST_WIDTH = 300 };

static void test_casts_gather_columns_of_both_widths(void) {
  static double left[CAST_ROWS][2], right[CAST_ROWS][CAST_WIDTH + 1];
  static float out[CAST_ROWS + 1][2 + CAST_WIDTH], expected[CAST_WIDTH + 2];
  static double back_left[2][2], back_right[2][CAST_WIDTH];
  for (int r = 0; r < CAST_ROWS; ++r)
    for (int i = 0; i < CAST_WIDTH + 2; ++i)
      *(i < 2 ? &left[r][i] : &right[r][i - 2]) = r + i / 1000.0;
  hcp_column sources[] = {{left, sizeof left[0], sizeof left[0]},
                          {NULL, 0, 0},
                          {right, sizeof right[0], CAST_WIDTH * sizeof(double)}};
  hcp_column whole = {out, sizeof out[0], sizeof out[0]};
  hcp_segment segments[] = {{1, 2}, {-1, 1}, {1, 1}};
  int rows[] = {1, 2, -1, 1};
  for (int r = 0; r < CAST_ROWS + 1; ++r)
    for (int i = 0; i < CAST_WIDTH + 2; ++i) out[r][i] = NAN;
  hcp_cpu_pack(&(hcp_cast){HCP_FLOAT64, HCP_FLOAT32}, sources, 3, segments, COUNT(segments), whole);
  for (int r = 0; r < CAST_ROWS + 1; ++r) {
    for (int i = 0; i < CAST_WIDTH + 2; ++i)
      expected[i] = rows[r] < 0 ? 0 : (float)(rows[r] + i / 1000.0);
    CHECK_INT(memcmp(out[r], expected, sizeof expected), 0);
  }
  hcp_column outs[] = {{back_left, sizeof back_left[0], sizeof back_left[0]},
                       {back_right, sizeof back_right[0], sizeof back_right[0]}};
  hcp_segment back[] = {{3, 1}, {1, 1}};
  hcp_cpu_unpack(&(hcp_cast){HCP_FLOAT32, HCP_FLOAT64}, whole, back, COUNT(back), outs, 2);
  for (int i = 0; i < CAST_WIDTH; ++i) {
    CHECK_NEAR(back_right[0][i], (double)out[3][i + 2], 0);
    CHECK_NEAR(back_right[1][i], (double)out[1][i + 2], 0);
  }
  CHECK_NEAR(back_left[1][1], (double)out[1][1], 0);
}

static void test_casts_of_nothing(void) {
  hcp_cast cast = {HCP_BFLOAT16, HCP_FLOAT64};
  hcp_column nothing = {NULL, 0, 0}, no_rows = {NULL, 4, 4}, no_wide_rows = {NULL, 16, 16};
  hcp_segment zeros = {-1, 5}, empty = {0, 0};
  hcp_cpu_pack(&cast, &nothing, 1, &zeros, 1, nothing);
  hcp_cpu_pack(&cast, &no_rows, 1, &empty, 1, no_wide_rows);
  hcp_cpu_unpack(&cast, no_rows, &empty, 1, &no_wide_rows, 1);
  hcp_cpu_reduce(&(hcp_sum){cast.from, &no_rows, 1, NULL, 0, 0}, &cast, no_wide_rows);
}

/* A value of 16 bits as float64, and from there to 16 bits of a dtype. */
static void test_every_16_bit_value_comes_back_from_float64(void) {
  hcp_dtype dtypes[] = {HCP_BFLOAT16, HCP_FLOAT16};
  hcp_segment all = {0, 1};
  for (int d = 0; d < 2; ++d)
    for (uint32_t value = 0; value <= UINT16_MAX; ++value) {
      uint16_t given = (uint16_t)value, back = 0x1234;
      double wide = -7;
      hcp_column narrow = {&given, 2, 2}, between = {&wide, 8, 8};
      hcp_cpu_pack(&(hcp_cast){dtypes[d], HCP_FLOAT64}, &narrow, 1, &all, 1, between);
      hcp_cpu_pack(&(hcp_cast){HCP_FLOAT64, dtypes[d]}, &between, 1, &all, 1,
                   (hcp_column){&back, 2, 2});
      if (is_nan_16(dtypes[d], given)) {
        CHECK(isnan(wide));
        CHECK(is_nan_16(dtypes[d], back));
      } else {
        CHECK_INT(back, given);
      }
    }
}

static uint16_t rounded_to_bfloat16(double value) {
  uint16_t out = 0x1234;
  hcp_segment all = {0, 1};
  hcp_column source = {&value, 8, 8};
  hcp_cpu_pack(&(hcp_cast){HCP_FLOAT64, HCP_BFLOAT16}, &source, 1, &all, 1,
               (hcp_column){&out, 2, 2});
  return out;
}

static void test_float64_reaches_16_bits_through_float32(void) {
  CHECK_INT(rounded_to_bfloat16(1 + 0x1p-8), 0x3f80);
  CHECK_INT(rounded_to_bfloat16(1 + 0x1p-8 + 0x1p-23), 0x3f81);
  /* Above the tie, which float32 does not see. */
  CHECK_INT(rounded_to_bfloat16(1 + 0x1p-8 + 0x1p-40), 0x3f80);
  CHECK_INT(rounded_to_bfloat16(1e300), 0x7f80);
  CHECK_INT(rounded_to_bfloat16(-1e-300), 0x8000);
}

static void test_a_cast_sum_is_rounded_once(void) {
  uint16_t values[] = {0x4380, 0x3f80, 0x3f80}; /* 256 + 1 + 1, where 257 is no bfloat16 */
  float out[2] = {NAN, NAN}, floats[] = {1, 0x1p-30f, -1};
  double wide[2] = {NAN, NAN};
  hcp_column part = {values, 2, 2}, float_part = {floats, 4, 4};
  hcp_run runs[] = {{1, 1, 0, 0}, {1, 1, 0, 1}, {1, 1, 0, 2}};
  hcp_cpu_reduce(&(hcp_sum){HCP_BFLOAT16, &part, 1, runs, COUNT(runs), 2},
                 &(hcp_cast){HCP_BFLOAT16, HCP_FLOAT32}, (hcp_column){out, 4, 4});
  CHECK_NEAR(out[0], 0, 0);
  CHECK_NEAR(out[1], 258, 0);
  hcp_cpu_reduce(&(hcp_sum){HCP_FLOAT32, &float_part, 1, runs, COUNT(runs), 2},
                 &(hcp_cast){HCP_FLOAT32, HCP_FLOAT64}, (hcp_column){wide, 8, 8});
  CHECK_NEAR(wide[1], 0x1p-30, 0);
}

/* ---- Merge --------------------------------------------------------------- */

/* One row and head of two elements in each of three parts. */
typedef struct scalars {
  float out[3][2];
  float lse[3];
} scalars;

static const hcp_run three_parts[] = {{0, 1, 0, 0}, {0, 1, 1, 0}, {0, 1, 2, 0}};

static void parts_of(const scalars *values, hcp_part *parts) {
  for (int p = 0; p < 3; ++p) parts[p] = (hcp_part){values->out[p], 2, 2, &values->lse[p], 1, 1};
}

static void expect_merge(scalars values, float expected_out, float expected_lse) {
  hcp_part parts[3];
  float out[2] = {-7, -7}, lse = -7;
  parts_of(&values, parts);
  hcp_cpu_merge(&(hcp_merge){HCP_FLOAT32, parts, three_parts, 3, 1, 1, 2, NULL, NULL}, out, &lse);
  CHECK_NEAR(out[0], expected_out, 1e-6);
  CHECK_NEAR(lse, expected_lse, 1e-6);
}

static void test_merge_with_infinite_lse(void) {
  expect_merge((scalars){{{1, 0}, {2, 0}, {6, 0}}, {0, 0, 0}}, 3, logf(3));
  expect_merge((scalars){{{NAN, 0}, {2, 0}, {4, 0}}, {-INFINITY, 1, 1}}, 3, 1 + logf(2));
  expect_merge((scalars){{{NAN, 0}, {NAN, 0}, {NAN, 0}}, {-INFINITY, -INFINITY, -INFINITY}}, 0,
               -INFINITY);
  expect_merge((scalars){{{5, 0}, {2, 0}, {9, 0}}, {FLT_MAX, INFINITY, -INFINITY}}, 2, INFINITY);
  expect_merge((scalars){{{5, 0}, {2, 0}, {4, 0}}, {1, INFINITY, INFINITY}}, 3, INFINITY);
  expect_merge((scalars){{{5, 0}, {2, 0}, {4, 0}}, {1, NAN, -INFINITY}}, NAN, NAN);
  expect_merge((scalars){{{5, 0}, {2, 0}, {4, 0}}, {INFINITY, NAN, 1}}, NAN, NAN);
  expect_merge((scalars){{{5, 0}, {2, 0}, {4, 0}}, {NAN, NAN, -INFINITY}}, NAN, NAN);
}

static void test_merge_fills_rows_that_no_run_names(void) {
  double part_out[] = {1, 2}, part_lse[] = {3}, out[6], lse[3];
  hcp_part part = {part_out, 2, 2, part_lse, 1, 1};
  hcp_run run = {1, 1, 0, 0};
  for (int i = 0; i < 6; ++i) out[i] = lse[i / 2] = NAN;
  hcp_cpu_merge(&(hcp_merge){HCP_FLOAT64, &part, &run, 1, 3, 1, 2, NULL, NULL}, out, lse);
  double expected_out[] = {0, 0, 1, 2, 0, 0}, expected_lse[] = {-INFINITY, 3, -INFINITY};
  for (int i = 0; i < 6; ++i) CHECK_NEAR(out[i], expected_out[i], 0);
  for (int i = 0; i < 3; ++i) CHECK_NEAR(lse[i], expected_lse[i], 0);
}

/* Heads before rows, elements of a head side by side; more than one TILE. */
static void test_merge_of_strided_heads(void) {
  enum { ROWS = 2, HEADS = 3, DIM = 300 };
  static double part_out[HEADS][ROWS][DIM + 1], out[ROWS][HEADS][DIM];
  double part_lse[HEADS][ROWS], lse[ROWS][HEADS];
  for (int h = 0; h < HEADS; ++h)
    for (int r = 0; r < ROWS; ++r) {
      part_lse[h][r] = 10 * h + r;
      for (int d = 0; d < DIM; ++d) part_out[h][r][d] = 10000 * h + 1000 * r + d;
    }
  hcp_part part = {part_out, DIM + 1, ROWS * (DIM + 1), part_lse, 1, ROWS};
  hcp_run runs[] = {{0, ROWS, 0, 0}, {0, ROWS, 0, 0}}; /* with itself: the same, and log 2 */
  hcp_merge merge = {HCP_FLOAT64, &part, runs, COUNT(runs), ROWS, HEADS, DIM, NULL, NULL};
  hcp_cpu_merge(&merge, out, lse);
  for (int h = 0; h < HEADS; ++h)
    for (int r = 0; r < ROWS; ++r) {
      CHECK_NEAR(lse[r][h], 10 * h + r + log(2), 1e-12);
      for (int d = 0; d < DIM; ++d) CHECK_NEAR(out[r][h][d], 10000 * h + 1000 * r + d, 1e-8);
    }
}

static void test_merge_of_nothing(void) {
  float lse = 7;
  hcp_cpu_merge(&(hcp_merge){.dtype = HCP_FLOAT32, .heads = 4, .head_dim = 8}, NULL, NULL);
  hcp_cpu_merge(&(hcp_merge){.dtype = HCP_FLOAT32, .rows = 1, .heads = 1}, NULL, &lse);
  CHECK_NEAR(lse, -INFINITY, 0);
}

/* ---- rotary embedding ---- */

enum { HEADS = 2, HEAD_DIM = 7, TURNED = 6, TURNED_ROWS = 3 };
static double turned_cos[TURNED_ROWS][TURNED], turned_sin[TURNED_ROWS][TURNED];

/* Every element has an angle of its own, so that the transpose is not the way back. */
static hcp_rotation rotation(int interleaved, int inverse) {
  for (int r = 0; r < TURNED_ROWS; ++r)
    for (int i = 0; i < TURNED; ++i) {
      turned_cos[r][i] = cos(10 * r + i);
      turned_sin[r][i] = sin(10 * r + i);
    }
  return (hcp_rotation){turned_cos, turned_sin, HEAD_DIM, TURNED / 2, interleaved, inverse};
}

/* The element that turns into element i, and the sign with which it does. */
static int other_of(int i, int interleaved, double *sign) {
  int first = interleaved ? i % 2 == 0 : i < TURNED / 2;
  int distance = interleaved ? 1 : TURNED / 2;
  *sign = first ? -1 : 1;
  return first ? i + distance : i - distance;
}

static double turned_element(const double *head, int row, int i, int interleaved, int inverse) {
  double sign;
  if (i >= TURNED) return head[i];
  int j = other_of(i, interleaved, &sign);
  if (inverse) return head[i] * turned_cos[row][i] - sign * head[j] * turned_sin[row][j];
  return head[i] * turned_cos[row][i] + sign * head[j] * turned_sin[row][i];
}

/* Heads of strided rows, turned, and copied to the wire rows that want them. */
static void expect_turned(int interleaved, int inverse) {
  static double source[TURNED_ROWS][HEADS][HEAD_DIM + 2], out[TURNED_ROWS][HEADS][HEAD_DIM];
  double wire[5][HEADS * HEAD_DIM + 3];
  for (int r = 0; r < TURNED_ROWS; ++r)
    for (int h = 0; h < HEADS; ++h)
      for (int i = 0; i < HEAD_DIM; ++i) source[r][h][i] = 100 * r + 10 * h + i + 0.5;
  for (int r = 0; r < 5; ++r)
    for (int i = 0; i < HEADS * HEAD_DIM + 3; ++i) wire[r][i] = -1;
  hcp_rotation turn = rotation(interleaved, inverse);
  hcp_run runs[] = {{1, 1, 0, 0}, {1, 1, 0, 3}, {2, 1, 0, 4}}; /* row 1 twice, row 0 never */
  int64_t bytes = HEADS * HEAD_DIM * (int64_t)sizeof(double);
  hcp_cpu_rotate(HCP_FLOAT64, (hcp_heads){source, HEADS * (HEAD_DIM + 2), HEAD_DIM + 2}, &turn,
                 runs, COUNT(runs), TURNED_ROWS, (hcp_column){out, bytes, bytes},
                 (hcp_column){wire, (int64_t)sizeof wire[0], bytes});
  static const int wire_row[] = {1, -1, -1, 1, 2}; /* the row of out that each one holds */
  for (int r = 0; r < TURNED_ROWS; ++r)
    for (int h = 0; h < HEADS; ++h)
      for (int i = 0; i < HEAD_DIM; ++i)
        CHECK_NEAR(out[r][h][i], turned_element(source[r][h], r, i, interleaved, inverse), 1e-12);
  for (int r = 0; r < 5; ++r)
    for (int i = 0; i < HEADS * HEAD_DIM + 3; ++i)
      CHECK_NEAR(wire[r][i],
                 wire_row[r] < 0 || i >= HEADS * HEAD_DIM
                     ? -1
                     : out[wire_row[r]][i / HEAD_DIM][i % HEAD_DIM],
                 0);
}

/* One turned column of two, beside one that is not; the last row has no part. */
static void expect_turned_sum(int interleaved, int inverse) {
  double parts[4][TURNED_ROWS][HEAD_DIM], out[TURNED_ROWS][2 * HEAD_DIM], head[HEAD_DIM];
  hcp_column columns[4];
  int64_t bytes = (int64_t)sizeof head;
  for (int p = 0; p < 4; ++p) {
    columns[p] = (hcp_column){parts[p], bytes, bytes};
    for (int r = 0; r < TURNED_ROWS; ++r)
      for (int i = 0; i < HEAD_DIM; ++i) parts[p][r][i] = 100 * p + 10 * r + i;
  }
  hcp_rotation turn = rotation(interleaved, inverse);
  hcp_run runs[] = {{0, 2, 0, 1}, {0, 2, 1, 0}};
  hcp_sum sum = {HCP_FLOAT64, columns, 2, runs, COUNT(runs), TURNED_ROWS};
  hcp_cpu_reduce_rotated(&sum, &turn, 1, (hcp_column){out, 2 * bytes, 2 * bytes});
  for (int r = 0; r < TURNED_ROWS; ++r)
    for (int i = 0; i < HEAD_DIM; ++i) {
      int named = r < 2;
      for (int e = 0; e < HEAD_DIM; ++e) head[e] = named ? parts[0][r + 1][e] + parts[2][r][e] : 0;
      CHECK_NEAR(out[r][i], turned_element(head, r, i, interleaved, inverse), 1e-12);
      CHECK_NEAR(out[r][HEAD_DIM + i], named ? parts[1][r + 1][i] + parts[3][r][i] : 0, 0);
    }
}

static void test_rows_turn_as_the_formula_says(void) {
  for (int interleaved = 0; interleaved < 2; ++interleaved)
    for (int inverse = 0; inverse < 2; ++inverse) {
      expect_turned(interleaved, inverse);
      expect_turned_sum(interleaved, inverse);
    }
}

/* Whole pairs, in order, whatever the tile: what a GPU's slots are cut by. */
static void test_pairs_cover_a_head_once(void) {
  for (int interleaved = 0; interleaved < 2; ++interleaved) {
    int seen[10] = {0};
    for (int64_t p = 0; p < 5; ++p) {
      ++seen[hcp_pair_first(p, interleaved)];
      ++seen[hcp_pair_second(p, 5, interleaved)];
    }
    for (int i = 0; i < 10; ++i) CHECK(seen[i] == 1);
  }
}

int main(void) {
  test_segments();
  test_segments_whose_sum_overflows();
  test_runs();
  test_records_of_equal_rows_are_one_run();
  test_the_place_of_a_row_is_the_last_that_starts_at_or_before_it();
  test_a_row_is_in_its_piece();
  test_pack_and_unpack();
  test_gathers_of_nothing();
  test_reduce();
  test_reduce_columns_into_strided_rows();
  test_every_16_bit_value_comes_back();
  test_ties_round_to_even();
  test_a_sum_is_rounded_once();
  test_casts_gather_columns_of_both_widths();
  test_casts_of_nothing();
  test_every_16_bit_value_comes_back_from_float64();
  test_float64_reaches_16_bits_through_float32();
  test_a_cast_sum_is_rounded_once();
  test_merge_with_infinite_lse();
  test_merge_fills_rows_that_no_run_names();
  test_merge_of_strided_heads();
  test_merge_of_nothing();
  test_rows_turn_as_the_formula_says();
  test_pairs_cover_a_head_once();
  return check_report("test_kernels");
}
