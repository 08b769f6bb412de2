/* check.h - assertions of the C tests: print place and values, count, go on.
 *
 *   int main(void) {
 *     CHECK(plan != NULL);
 *     CHECK_INT(plan->n, 3);
 *     CHECK_TEXT(err.message, "expected >= 1");
 *     return check_report("test_plan");
 *   }
 */
#ifndef HCP_TESTS_CHECK_H
#define HCP_TESTS_CHECK_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static int check_count;
static int check_failures;

/* Starts a check: true when it held, else the place is printed. */
static inline int check__holds(int held, const char *file, int line, const char *text) {
  ++check_count;
  if (held) return 1;
  ++check_failures;
  fprintf(stderr, "%s:%d: %s", file, line, text);
  return 0;
}

#define CHECK(condition)                                                 \
  do {                                                                   \
    if (!check__holds((condition) != 0, __FILE__, __LINE__, #condition)) \
      fprintf(stderr, " is false\n");                                    \
  } while (0)

#define CHECK_INT(actual, expected)                                                       \
  do {                                                                                    \
    int64_t actual_ = (int64_t)(actual), expected_ = (int64_t)(expected);                 \
    if (!check__holds(actual_ == expected_, __FILE__, __LINE__, #actual))                 \
      fprintf(stderr, " is %" PRId64 ", expected %" PRId64 " (%s)\n", actual_, expected_, \
              #expected);                                                                 \
  } while (0)

/* Equal, both NaN, or at most tolerance apart. */
#define CHECK_NEAR(actual, expected, tolerance)                                                    \
  do {                                                                                             \
    double actual_ = (double)(actual), expected_ = (double)(expected);                             \
    double apart_ = actual_ > expected_ ? actual_ - expected_ : expected_ - actual_;               \
    int near_ = actual_ == expected_ || apart_ <= (tolerance) ||                                   \
                (actual_ != actual_ && expected_ != expected_);                                    \
    if (!check__holds(near_, __FILE__, __LINE__, #actual))                                         \
      fprintf(stderr, " is %.9g, expected %.9g (%s) within %.3g\n", actual_, expected_, #expected, \
              (double)(tolerance));                                                                \
  } while (0)

/* text holds part. */
#define CHECK_TEXT(text, part)                                                                   \
  do {                                                                                           \
    const char *text_ = (text), *part_ = (part);                                                 \
    int found_ = text_ != NULL && strstr(text_, part_) != NULL;                                  \
    if (!check__holds(found_, __FILE__, __LINE__, #text))                                        \
      fprintf(stderr, " is \"%s\", expected to hold \"%s\"\n", text_ != NULL ? text_ : "(null)", \
              part_);                                                                            \
  } while (0)

/* The exit status of main: 0 when every check held. */
static inline int check_report(const char *name) {
  fprintf(stderr, "%s: %d checks, %d failed\n", name, check_count, check_failures);
  return check_failures != 0;
}

#endif
