/* priced.c - hcp_plan_bound, and a sharper bound for ranks that wait for each other after every
 * micro-batch, at the price of a search. Plans do without it: only hcp._core has this file.
 *
 * Give every sequence any price >= 0, and let V(h) be at least what the sequences of a
 * micro-batch of height h or less are worth together. A plan holds every sequence once, so
 *
 *   sum of prices <= sum of V(h_m) <= makespan * max of V(h) / h
 *
 * over its heights h_m: no plan is faster than the sum over that maximum. This is the
 * dual of the linear program that chooses among all possible micro-batches (Gilmore and
 * Gomory, doi 10.1287/opre.9.6.849). The bound holds for any prices. Good ones solve that
 * program over the micro-batches that are known: floating point finds them, and integers
 * prove the bound.
 *
 * V. A micro-batch is groups of d ranks, N in all. The longest sequence of a group leads
 * it, and none leads twice. A leader leaves h - launch - its time, and d C - its rows;
 * the others of its group are no longer and fit in both, so they are worth at most the
 * best price per time of such a sequence times that time, and likewise by rows, and at
 * most what all of them are. For any price r of a rank, the groups are worth at most
 * N r + the sum over leaders of the most that a group of theirs is worth above r d; the few
 * choices that may still be in the best set are a knapsack of N ranks.
 *
 * V rises with h: between two heights, V / h is at most V of the upper over the lower. The
 * interval with the highest such value is split until it is narrow. Everything is rounded
 * so that the bound holds. Nodes, slow ranks and intervals only make plans slower. */
#include <stdlib.h>
#include <string.h>

#include "../core/plan/plan.h"

enum {
  PAIRS = 1 << 17, /* kinds times degrees, and ranks times degrees, of a search, at most */
  TIME_BITS = 34,  /* bits of the scaled bound, at most */
  AREA_BITS = 46,  /* bits to which the rank-time of all sequences is shifted up */
  ALL_BITS = 56,   /* bits of the rank-time of all sequences, at most: more are not searched */
  RATE_BITS = 61,  /* bits of a price per time or per row, at most */
  ONE = 1 << 16,   /* fixed point: the share 1, and a price that equals the rank-time */
  KNOTS = 33,      /* knots of the price per rank-time, which is linear between two of them */
  FINE = 64,       /* positions between two knots */
  POSITIONS = (KNOTS - 1) * FINE,
  EDGES = 16,      /* the first proof looks at heights 1 / EDGES of a height apart */
  HEIGHTS = 512,   /* heights of the first proof, at most, and of the first steps */
  SPLITS = 160,    /* heights that a proof adds where V / h decides, at most */
  THIN = 48,       /* heights of sequences are kept 1 / THIN of a height apart */
  DECIDING = 32,   /* heights that a proof adds to those of later steps, at most */
  TURNS = 5,       /* turns for each unit of effort: a turn is STEPS steps and a proof */
  STEPS = 16,      /* steps of prices in a turn */
  DEAREST = 4,     /* highest price of a unit of rank-time */
  PARTS = 4,       /* a step looks at one of PARTS heights */
  TAKEN = 1 << 20, /* leaders times ranks of a knapsack, at most */
  ROWS = 2048,     /* micro-batches of the linear program, at most */
  PIVOTS = 5000,   /* pivots of the linear program, at most */
  BISECTIONS = 6   /* the price of a rank is bisected to 1 / 2^BISECTIONS of itself */
};

/* The weight of a step's prices in their mean: a share of 1. */
#define PULL 0.3

#define NEVER (INT64_MAX / 4)

/* One way in which a sequence leads a group: [degree][kind]. */
typedef struct way {
  int64_t time;  /* NEVER: not at that degree */
  int64_t least; /* time of it and all longer ones */
  int64_t rate;  /* highest price per time of it and all shorter ones */
  int64_t worth; /* of its group, at the height that was looked at; -1: too slow */
  int32_t first_by_rows; /* the first whose rows fit beside it */
  int32_t best;  /* of which rate is */
} way;

/* Heights from low to at: V / h is at most worth / low there. */
typedef struct height {
  int64_t at, low, worth;
} height;

typedef struct priced {
  const hcp__problem *p;
  int32_t kinds, degree_count;
  int32_t *degrees;
  way *ways;          /* degree_count * kinds */
  int32_t scale;      /* times are in 2^scale */
  int64_t launch, bound;
  int32_t rate_bits;
  int64_t *area, *price; /* kinds: of one sequence */
  int64_t *sums;         /* kinds + 1: prices of all from that one on */
  int64_t *row_rates;    /* kinds: as rate, by row */
  int32_t *best_by_row, *position; /* kinds: of its rank-time among knots, in 1 / FINE */
  int32_t *choice;       /* degrees that a kind may lead */
  int64_t knots[KNOTS], need[KNOTS], all; /* rank-time near each knot, and of all */
  double mean[KNOTS], found[KNOTS];
  double rows[ROWS][KNOTS + 1], tableau[ROWS + 1][KNOTS + 1];
  int32_t row_count, basis[ROWS], outside[KNOTS];
  int32_t leaders, leaders_most, *leader; /* of the knapsack, and what they took there: */
  int16_t *taken;                         /* leaders_most * (ranks + 1) degrees, -1: none */
  int64_t *table;                         /* ranks + 1 */
  int64_t heights[HEIGHTS + SPLITS]; /* for which micro-batches are looked for */
  int32_t height_count, proof_count;
  height proof[HEIGHTS + SPLITS];
} priced;

static int32_t bits_of(int64_t value) {
  return value > 0 ? 64 - __builtin_clzll((uint64_t)value) : 0;
}

static way *way_of(const priced *o, int32_t d, int32_t k) {
  return &o->ways[(size_t)d * (size_t)o->kinds + (size_t)k];
}

static const hcp__kind *kind_of(const priced *o, int32_t k) { return &o->p->kinds[k]; }

/* ---- times ---- */

/* The first from there on that has at most so many rows. */
static int32_t first_of_rows(const priced *o, int32_t low, int64_t rows) {
  int32_t high = o->kinds;
  while (low < high) {
    int32_t middle = low + (high - low) / 2;
    if (kind_of(o, middle)->size.length > rows)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

/* Rounded down; 0: too short for a time in this scale. */
static int make_times(priced *o) {
  const hcp__problem *p = o->p;
  for (int32_t d = 0; d < o->degree_count; d++)
    for (int32_t k = 0; k < o->kinds; k++) {
      const hcp__kind *kind = kind_of(o, k);
      way *one = way_of(o, d, k);
      int64_t time = hcp__cost(p->cost, kind->size, o->degrees[d], p->limits->ranks_per_node);
      int holds = time > 0 && hcp__load(p, p->order[kind->first], o->degrees[d]) <= p->capacity;
      *one = (way){.time = holds ? time >> o->scale : NEVER};
      if (one->time == 0) return 0;
      one->least =
          k > 0 && way_of(o, d, k - 1)->least < one->time ? way_of(o, d, k - 1)->least : one->time;
      int64_t rows = p->capacity * o->degrees[d] - kind->size.length;
      one->first_by_rows = first_of_rows(o, k + (kind->count == 1), rows);
    }
  return 1;
}

/* Least rank-time, and where it stands among that of all. 0: too much for a price of DEAREST. */
static int make_areas(priced *o) {
  int64_t all = 0, sum = 0;
  for (int32_t k = 0; k < o->kinds; k++) {
    o->area[k] = NEVER;
    for (int32_t d = 0; d < o->degree_count; d++) {
      int64_t time = way_of(o, d, k)->time;
      if (time < o->area[k] / o->degrees[d]) o->area[k] = time * o->degrees[d];
    }
    all = hcp__sum(all, hcp__scaled(o->area[k], kind_of(o, k)->count, 1));
  }
  if (bits_of(all) > ALL_BITS) return 0;
  o->all = 0;
  int32_t up = bits_of(all) < AREA_BITS ? AREA_BITS - bits_of(all) : 0;
  memset(o->need, 0, sizeof o->need);
  for (int32_t k = 0; k < o->kinds; k++) {
    int64_t own = o->area[k] * kind_of(o, k)->count;
    int64_t at = hcp__scaled(sum + own / 2, POSITIONS, all);
    o->position[k] = (int32_t)(at < POSITIONS ? at : POSITIONS - 1);
    o->area[k] <<= up;
    sum += own;
    own <<= up;
    o->all += own;
    int32_t knot = o->position[k] / FINE, part = o->position[k] % FINE;
    o->need[knot] += own / FINE * (FINE - part);
    o->need[knot + 1] += own / FINE * part;
  }
  return 1;
}

/* ---- prices ---- */

/* Prices of sequences from those of knots, and what follows from them. */
static void set_prices(priced *o) {
  int64_t most = 1;
  o->sums[o->kinds] = 0;
  for (int32_t k = o->kinds - 1; k >= 0; k--) {
    int32_t knot = o->position[k] / FINE, part = o->position[k] % FINE;
    int64_t factor = (o->knots[knot] * (FINE - part) + o->knots[knot + 1] * part) / FINE;
    o->price[k] = (int64_t)((hcp__wide)o->area[k] * factor >> 16);
    o->sums[k] = o->sums[k + 1] + o->price[k] * kind_of(o, k)->count;
    if (o->price[k] > most) most = o->price[k];
  }
  o->rate_bits = RATE_BITS - bits_of(most);
  for (int32_t k = o->kinds - 1; k >= 0; k--) {
    int64_t rate = (o->price[k] << o->rate_bits) / kind_of(o, k)->size.length + 1;
    int shorter = k + 1 < o->kinds && o->row_rates[k + 1] >= rate;
    o->row_rates[k] = shorter ? o->row_rates[k + 1] : rate;
    o->best_by_row[k] = shorter ? o->best_by_row[k + 1] : k;
    for (int32_t d = 0; d < o->degree_count; d++) {
      way *one = way_of(o, d, k), *next = one + 1;
      rate = one->time < NEVER ? (o->price[k] << o->rate_bits) / one->time + 1 : 0;
      shorter = k + 1 < o->kinds && next->rate >= rate;
      one->rate = shorter ? next->rate : rate;
      one->best = shorter ? next->best : k;
    }
  }
}

/* ---- groups ---- */

/* The first that may stand beside the leader in the time that it leaves. */
static int32_t first_beside(const priced *o, int32_t d, int32_t k, int64_t left) {
  int32_t low = way_of(o, d, k)->first_by_rows, high = o->kinds;
  while (low < high) {
    int32_t middle = low + (high - low) / 2;
    if (way_of(o, d, middle)->least > left)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

static int64_t product(const priced *o, int64_t rate, int64_t amount) {
  hcp__wide worth = ((hcp__wide)rate * amount >> o->rate_bits) + 1;
  return worth < NEVER ? (int64_t)worth : NEVER;
}

typedef struct fill {
  int32_t first;
  int64_t left, rows;
  int64_t timed, rowed; /* worth at most */
} fill;

static fill fill_of(const priced *o, int32_t d, int32_t k, int64_t at) {
  fill f = {.left = at - o->launch - way_of(o, d, k)->time};
  f.rows = o->p->capacity * o->degrees[d] - kind_of(o, k)->size.length;
  f.first = first_beside(o, d, k, f.left);
  if (f.first == o->kinds) return f;
  f.timed = product(o, way_of(o, d, f.first)->rate, f.left);
  f.rowed = product(o, o->row_rates[f.first], f.rows);
  return f;
}

/* What every group is worth at a height. */
static void look_at(priced *o, int64_t at) {
  for (int32_t d = 0; d < o->degree_count; d++)
    for (int32_t k = 0; k < o->kinds; k++) {
      way *one = way_of(o, d, k);
      one->worth = -1;
      if (one->time > at - o->launch) continue;
      fill f = fill_of(o, d, k, at);
      int64_t more = f.timed < f.rowed ? f.timed : f.rowed;
      if (more > o->sums[f.first]) more = o->sums[f.first];
      one->worth = o->price[k] + more;
    }
}

/* ---- micro-batches ---- */

typedef struct offer {
  int64_t rank; /* its price */
  hcp__wide worth;
  int64_t used; /* ranks of the groups that are worth more than theirs */
} offer;

static offer ask(priced *o, int64_t rank) {
  offer all = {rank, (hcp__wide)rank * o->p->limits->ranks, 0};
  for (int32_t k = 0; k < o->kinds; k++) {
    int64_t most = 0;
    int32_t choice = -1;
    for (int32_t d = 0; d < o->degree_count; d++) {
      int64_t gain = way_of(o, d, k)->worth - rank * o->degrees[d];
      if (gain <= most) continue;
      most = gain;
      choice = d;
    }
    if (most == 0) continue;
    all.worth += (hcp__wide)most * kind_of(o, k)->count;
    all.used += (int64_t)o->degrees[choice] * kind_of(o, k)->count;
  }
  return all;
}

/* The price of a rank at which the groups are worth least together, and that at least;
 * *floor is what some of them that fit on the ranks are worth. */
static offer cheapest(priced *o, int64_t at, int64_t *floor) {
  int32_t ranks = o->p->limits->ranks;
  int64_t guess = hcp__scaled(o->sums[0] / 2 / ranks, at, o->bound) + 1;
  offer few = ask(o, guess), many = ask(o, 0), least = few.worth < many.worth ? few : many;
  while (few.used > ranks && few.rank < NEVER / ranks / 2) {
    many = few;
    few = ask(o, few.rank + few.rank / 2 + 1);
    if (few.worth < least.worth) least = few;
  }
  for (int32_t i = 0; i < 4 * BISECTIONS && few.rank - many.rank > few.rank >> BISECTIONS; i++) {
    offer middle = ask(o, many.rank + (few.rank - many.rank) / 2);
    if (middle.worth < least.worth) least = middle;
    *(middle.used > ranks ? &many : &few) = middle;
  }
  hcp__wide worth = few.worth - (hcp__wide)few.rank * (ranks - few.used);
  *floor = few.used > ranks ? 0 : worth < o->sums[0] ? (int64_t)worth : o->sums[0];
  return least;
}

/* Choices of the kind that may be in a set worth more than least.worth - gap. */
static int32_t wanted(const priced *o, int32_t k, const offer *least, int64_t gap,
                      int32_t *choices) {
  int64_t top = 0;
  int32_t count = 0;
  for (int32_t d = 0; d < o->degree_count; d++) {
    int64_t gain = way_of(o, d, k)->worth - least->rank * o->degrees[d];
    if (gain > top) top = gain;
  }
  for (int32_t d = 0; d < o->degree_count; d++) {
    int64_t worth = way_of(o, d, k)->worth;
    if (worth >= 0 && top - (worth - least->rank * o->degrees[d]) <= gap) choices[count++] = d;
  }
  return count;
}

/* V at the height that was looked at: the best leaders and degrees are a knapsack of all
 * ranks. */
static int64_t worth_at(priced *o, int64_t at) {
  int64_t floor;
  int32_t ranks = o->p->limits->ranks;
  offer least = cheapest(o, at, &floor);
  o->leaders = 0;
  if (floor > 0) floor--; /* what is worth as much is found */
  if (least.worth <= floor) return floor;
  int64_t top = least.worth < o->sums[0] ? (int64_t)least.worth : o->sums[0];
  hcp__wide gap = least.worth - floor;
  memset(o->table, 0, ((size_t)ranks + 1) * sizeof *o->table);
  for (int32_t k = 0; k < o->kinds; k++) {
    int32_t count = wanted(o, k, &least, gap < NEVER ? (int64_t)gap : NEVER, o->choice);
    for (int32_t i = 0; count > 0 && i < kind_of(o, k)->count && i < ranks; i++) {
      if (o->leaders == o->leaders_most) return top;
      int16_t *taken = o->taken + (size_t)o->leaders * ((size_t)ranks + 1);
      o->leader[o->leaders++] = k;
      for (int32_t r = ranks; r >= 0; r--) {
        taken[r] = -1;
        for (int32_t c = 0; c < count; c++) {
          int32_t d = o->choice[c], degree = o->degrees[d];
          if (degree > r) break;
          int64_t with = o->table[r - degree] + way_of(o, d, k)->worth;
          if (with > o->sums[0]) with = o->sums[0];
          if (with <= o->table[r]) continue;
          o->table[r] = with;
          taken[r] = (int16_t)d;
        }
      }
    }
  }
  int64_t worth = o->table[ranks] < top ? o->table[ranks] : top;
  return worth > floor ? worth : floor;
}

/* ---- the linear program over known micro-batches ---- */

/* What a micro-batch holds: rank-time near each knot, in parts of all. */
static void cover(const priced *o, double *row, int32_t k, double times) {
  int32_t knot = o->position[k] / FINE, part = o->position[k] % FINE;
  double share = (double)o->area[k] / (double)o->all * times / FINE;
  row[knot] += share * (FINE - part);
  row[knot + 1] += share * part;
}

/* A group: its leader, and what is worth most in the room beside it. */
static void cover_group(const priced *o, int64_t at, int32_t d, int32_t k, double *row) {
  fill f = fill_of(o, d, k, at);
  cover(o, row, k, 1);
  if (f.first == o->kinds) return;
  int32_t by_time = way_of(o, d, f.first)->best, by_row = o->best_by_row[f.first];
  int64_t sum = o->sums[f.first];
  if (sum <= f.timed && sum <= f.rowed)
    for (int32_t i = f.first; i < o->kinds; i++) cover(o, row, i, kind_of(o, i)->count);
  else if (f.timed < f.rowed)
    cover(o, row, by_time, (double)f.left / (double)way_of(o, d, by_time)->time);
  else
    cover(o, row, by_row, (double)f.rows / (double)kind_of(o, by_row)->size.length);
}

/* The micro-batch of that height that is worth most joins those known. */
static void add_batch(priced *o, int64_t at) {
  if (o->row_count == ROWS) return;
  double *row = o->rows[o->row_count], worth = 0;
  memset(row, 0, sizeof o->rows[0]);
  look_at(o, at);
  worth_at(o, at);
  int32_t ranks = o->p->limits->ranks;
  for (int32_t i = o->leaders - 1; i >= 0; i--) {
    int32_t d = o->taken[(size_t)i * ((size_t)o->p->limits->ranks + 1) + (size_t)ranks];
    if (d < 0) continue;
    cover_group(o, at, d, o->leader[i], row);
    ranks -= o->degrees[d];
  }
  row[KNOTS] = (double)at / (double)o->bound;
  for (int32_t i = 0; i < KNOTS; i++) worth += row[i] * o->found[i];
  o->row_count += worth > row[KNOTS];
}

/* One pivot of the simplex method: the variable of the column enters, that of the row
 * leaves. */
static void pivot(priced *o, int32_t row, int32_t column) {
  double *at = o->tableau[row], by = 1 / at[column];
  for (int32_t j = 0; j <= KNOTS; j++) at[j] *= by;
  at[column] = by;
  for (int32_t i = 0; i <= o->row_count; i++) {
    double *other = o->tableau[i], times = other[column];
    if (i == row || times == 0) continue;
    for (int32_t j = 0; j <= KNOTS; j++) other[j] -= times * at[j];
    other[column] = -times * by;
  }
  int32_t swap = o->basis[row];
  o->basis[row] = o->outside[column];
  o->outside[column] = swap;
}

/* Prices of knots with the largest sum at which no known micro-batch is worth more than
 * its height, by the simplex method. */
static void solve(priced *o) {
  memcpy(o->tableau, o->rows, (size_t)o->row_count * sizeof o->rows[0]);
  double *gains = o->tableau[o->row_count];
  for (int32_t j = 0; j < KNOTS; j++) gains[j] = -(double)o->need[j] / (double)o->all;
  gains[KNOTS] = 0;
  for (int32_t j = 0; j < KNOTS; j++) o->outside[j] = j;
  for (int32_t i = 0; i < o->row_count; i++) o->basis[i] = KNOTS + i;
  for (int32_t turn = 0; turn < PIVOTS; turn++) {
    int32_t column = 0, row = -1;
    for (int32_t j = 1; j < KNOTS; j++)
      if (gains[j] < gains[column]) column = j;
    if (gains[column] > -1e-9) break;
    for (int32_t i = 0; i < o->row_count; i++) {
      const double *one = o->tableau[i];
      if (one[column] > 1e-9 &&
          (row < 0 || one[KNOTS] * o->tableau[row][column] < o->tableau[row][KNOTS] * one[column]))
        row = i;
    }
    if (row < 0) break;
    pivot(o, row, column);
  }
  memset(o->found, 0, sizeof o->found);
  for (int32_t i = 0; i < o->row_count; i++)
    if (o->basis[i] < KNOTS) o->found[o->basis[i]] = o->tableau[i][KNOTS];
}

/* No price is far above another. */
static void start(priced *o) {
  o->row_count = KNOTS;
  memset(o->rows, 0, KNOTS * sizeof o->rows[0]);
  for (int32_t i = 0; i < KNOTS; i++) {
    o->rows[i][i] = 1;
    o->rows[i][KNOTS] = DEAREST;
    o->mean[i] = 1;
  }
}

/* Prices go a part of the way to those of the linear program. */
static void step(priced *o, int32_t i) {
  solve(o);
  for (int32_t n = 0; n < KNOTS; n++) {
    o->mean[n] += PULL * (o->found[n] - o->mean[n]);
    double price = o->mean[n] > 1e-4 ? o->mean[n] : 1e-4;
    o->knots[n] = (int64_t)((price < DEAREST ? price : DEAREST) * ONE);
  }
  set_prices(o);
  for (int32_t n = i % PARTS; n < o->height_count && !hcp__stopped(o->p); n += PARTS)
    add_batch(o, o->heights[n]);
}

/* ---- proof ---- */

static int64_t worth_of(priced *o, int64_t at) {
  look_at(o, at);
  return worth_at(o, at);
}

static int decides_more(const height *a, const height *b) {
  return (hcp__wide)a->worth * b->low > (hcp__wide)b->worth * a->low;
}

static int32_t deciding(const priced *o) {
  int32_t most = 0;
  for (int32_t i = 1; i < o->proof_count; i++)
    if (decides_more(&o->proof[i], &o->proof[most])) most = i;
  return most;
}

/* A time that no plan beats at these prices. */
static int64_t prove(priced *o, const height *edges, int32_t count) {
  o->proof_count = count;
  for (int32_t i = 0; i < count; i++) {
    o->proof[i] = edges[i];
    o->proof[i].worth = hcp__stopped(o->p) ? 0 : worth_of(o, edges[i].at);
  }
  for (int32_t i = 0; i < SPLITS && !hcp__stopped(o->p); i++) {
    height *h = &o->proof[deciding(o)];
    if (h->at - h->low <= h->low >> 11) break;
    int64_t middle = h->low + (h->at - h->low) / 2;
    o->proof[o->proof_count++] = (height){h->at, middle + 1, h->worth};
    *h = (height){middle, h->low, worth_of(o, middle)};
  }
  const height *h = &o->proof[deciding(o)];
  int64_t time = hcp__scaled(o->sums[0], h->low, h->worth > 0 ? h->worth : 1) - 1;
  return time < 2 * o->bound ? time : 2 * o->bound;
}

/* From the lowest micro-batch to twice the bound. */
static int32_t make_edges(const priced *o, height *edges) {
  int64_t least = NEVER, top = 2 * o->bound;
  int32_t count = 0;
  for (int32_t d = 0; d < o->degree_count; d++)
    if (way_of(o, d, o->kinds - 1)->least < least) least = way_of(o, d, o->kinds - 1)->least;
  for (int64_t low = o->launch + least; low <= top && count < HEIGHTS;) {
    int64_t at = low + low / EDGES < top ? low + low / EDGES : top;
    if (count + 1 == HEIGHTS) at = top;
    edges[count++] = (height){at, low, 0};
    low = at + 1;
  }
  return count;
}

/* Heights that decided, from now on looked at themselves. */
static void add_heights(priced *o) {
  for (int32_t i = 0; i < DECIDING && o->height_count < HEIGHTS + SPLITS && o->proof_count > 1;
       i++) {
    int32_t n = deciding(o);
    int64_t at = o->proof[n].at;
    int32_t known = 0;
    o->proof[n] = o->proof[--o->proof_count];
    for (int32_t k = 0; k < o->height_count; k++) {
      int64_t apart = o->heights[k] - at;
      known |= (apart < 0 ? -apart : apart) <= at / 512;
    }
    if (!known) o->heights[o->height_count++] = at;
  }
}

/* Those of single sequences at some degree, thinned out: edge after edge, the lowest in it. */
static void make_heights(priced *o) {
  int64_t top = o->bound;
  o->height_count = 0;
  for (int64_t low = 1; low <= top && o->height_count < HEIGHTS;) {
    int64_t next = NEVER;
    for (int32_t d = 0; d < o->degree_count; d++)
      for (int32_t k = 0; k < o->kinds; k++) {
        int64_t at = way_of(o, d, k)->time + o->launch;
        if (at >= low && at < next) next = at;
      }
    if (next > top) break;
    o->heights[o->height_count++] = next;
    low = next + next / THIN + 1;
  }
}

static int64_t search(priced *o, int32_t effort) {
  height edges[HEIGHTS];
  int32_t count = make_edges(o, edges);
  int64_t best = 0;
  start(o);
  make_heights(o);
  for (int32_t n = 0; n < KNOTS; n++) o->knots[n] = ONE;
  set_prices(o);
  for (int32_t turn = 0; turn < TURNS * effort && count > 0 && !hcp__stopped(o->p); turn++) {
    for (int32_t i = 0; i < STEPS && turn > 0; i++) step(o, i);
    int64_t bound = prove(o, edges, count);
    if (bound > best) best = bound;
    add_heights(o);
  }
  return best;
}

/* ---- memory ---- */

static void release(priced *o) {
  free(o->table);
  free(o->taken);
  free(o->leader);
  free(o->choice);
  free(o->position);
  free(o->best_by_row);
  free(o->row_rates);
  free(o->sums);
  free(o->price);
  free(o->area);
  free(o->ways);
  free(o->degrees);
  free(o);
}

static int allocate(priced *o) {
  size_t kinds = (size_t)o->kinds;
  o->ways = calloc(kinds * (size_t)o->degree_count, sizeof *o->ways);
  o->area = calloc(kinds, sizeof *o->area);
  o->price = calloc(kinds, sizeof *o->price);
  o->sums = calloc(kinds + 1, sizeof *o->sums);
  o->row_rates = calloc(kinds, sizeof *o->row_rates);
  o->best_by_row = calloc(kinds, sizeof *o->best_by_row);
  o->position = calloc(kinds, sizeof *o->position);
  size_t ranks = (size_t)o->p->limits->ranks + 1;
  o->leaders_most = (int32_t)(TAKEN / ranks);
  o->choice = calloc((size_t)o->degree_count, sizeof *o->choice);
  o->leader = calloc((size_t)o->leaders_most + 1, sizeof *o->leader);
  o->taken = malloc(((size_t)o->leaders_most + 1) * ranks * sizeof *o->taken);
  o->table = calloc(ranks, sizeof *o->table);
  return o->ways != NULL && o->area != NULL && o->price != NULL && o->sums != NULL &&
         o->row_rates != NULL && o->best_by_row != NULL && o->position != NULL &&
         o->choice != NULL && o->leader != NULL && o->taken != NULL && o->table != NULL;
}

/* Raises problem->bound, of effort 2 or more. */
static hcp_status priced_bound(hcp__problem *p, int32_t effort, hcp_error *err) {
  hcp_status status = HCP_OK;
  priced *o = calloc(1, sizeof *o);
  if (o == NULL) goto no_memory;
  o->degrees = malloc((size_t)p->limits->ranks * sizeof *o->degrees);
  if (o->degrees == NULL) goto no_memory;
  for (int32_t d = 1; d <= p->limits->ranks; d++)
    if (hcp__degree_allowed(p->limits, p->cost, d)) o->degrees[o->degree_count++] = d;
  o->p = p;
  o->kinds = p->kind_count;
  int64_t rows = o->kinds > p->limits->ranks ? o->kinds : p->limits->ranks;
  if (o->degree_count == 0 || rows * o->degree_count > PAIRS) goto done;
  if (!allocate(o)) goto no_memory;
  o->scale = bits_of(p->bound) > TIME_BITS ? bits_of(p->bound) - TIME_BITS : 0;
  o->launch = p->cost->launch >> o->scale;
  o->bound = p->bound >> o->scale;
  if (!make_times(o) || !make_areas(o)) goto done;
  int64_t bound = search(o, effort - 1);
  status = hcp__go_on(p, err);
  if (status == HCP_OK && bound << o->scale > p->bound) p->bound = bound << o->scale;
  goto done;
no_memory:
  status = hcp__fail(err, HCP_NO_MEMORY, "out of memory for %d sequences", p->n);
done:
  if (o != NULL) release(o);
  return status;
}

/* ---- the request ---- */

/* Those of pipelines are bisected: from a sharper bound of a stage may come one a little lower. */
static hcp_status sharpen(hcp__problem *p, int32_t effort, hcp_error *err) {
  int64_t usual = p->bound;
  if (effort < 2 || p->n == 0 || p->limits->sync != HCP_SYNC_MICRO_BATCH) return HCP_OK;
  hcp_status status = hcp__stage_bound(p, err);
  if (status == HCP_OK) status = priced_bound(p, effort, err);
  if (status == HCP_OK) status = hcp__pipeline_bound(p, err);
  p->bound = hcp__most(p->bound, usual);
  return status;
}

hcp_status hcp_plan_bound(const int64_t *lengths, int32_t n, const hcp_limits *limits,
                          const hcp_cost *cost, int32_t effort, const hcp_stop *stop,
                          int64_t *bound, int64_t *work, hcp_error *err) {
  hcp__problem problem;
  hcp_status status = hcp__effort_check(effort, err);
  if (status == HCP_OK) status = hcp__prepare(lengths, n, limits, cost, stop, &problem, err);
  if (status != HCP_OK) return status;
  status = sharpen(&problem, effort, err);
  if (status == HCP_OK) {
    *bound = problem.bound;
    *work = problem.work;
  }
  hcp__problem_release(&problem);
  return status;
}
