/* forced.c - every sequence at one degree, for each degree that holds all of them.
 *
 * These are plans, too, and with fewer choices a search may end with a better one. A
 * degree is searched when its bound is below the plan that is known, which exchange
 * and idle ranks prevent for nearly all of them. */
#include "plan.h"

/* Sequences times ranks up to which all degrees are looked at. */
enum { FORCED = 1 << 9 };

/* Keeps in *best what the search finds for a problem of one degree, if it is better. */
static hcp_status keep_better(const hcp__problem *p, int32_t effort, hcp__draft *best,
                              int64_t *least, hcp_error *err) {
  int64_t makespan;
  hcp__draft draft;
  hcp_status status = hcp__draft_init(&draft, p->n, err);
  if (status == HCP_OK) status = hcp__plan_search(p, effort, &draft, err);
  if (status == HCP_OK) status = hcp__makespan(&draft, p, &makespan, err);
  if (status == HCP_OK && makespan < *least) {
    hcp__draft swap = *best;
    *best = draft;
    draft = swap;
    *least = makespan;
  }
  hcp__draft_release(&draft);
  return status;
}

static hcp_status try_degree(const hcp__problem *p, int32_t degree, int32_t effort,
                             hcp__draft *best, int64_t *least, hcp_error *err) {
  hcp__problem forced;
  hcp_error refused = {0}; /* some sequence has no such degree, or does not fit */
  hcp_limits limits = *p->limits;
  limits.min_degree = limits.max_degree = degree;
  hcp_status status = hcp__problem_init(&forced, p->lengths, p->n, &limits, p->cost, &refused);
  if (status == HCP_NO_MEMORY) return hcp__fail(err, status, "%s", refused.message);
  if (status != HCP_OK) return HCP_OK;
  forced.stop = p->stop;
  if (forced.least / limits.ranks < *least || limits.slowness != NULL) {
    status = hcp__bound(&forced, err);
    if (status == HCP_OK && forced.bound < *least)
      status = keep_better(&forced, effort, best, least, err);
  }
  hcp__problem_release(&forced);
  return status;
}

hcp_status hcp__plan_forced(const hcp__problem *p, int32_t effort, hcp__draft *best,
                            hcp_error *err) {
  const hcp_limits *limits = p->limits;
  if (p->n == 0 || limits->pipeline.stages > 1 || (int64_t)p->n * limits->ranks > FORCED ||
      limits->min_degree == limits->max_degree)
    return HCP_OK;
  int64_t least;
  hcp_status status = hcp__makespan(best, p, &least, err);
  for (int32_t d = limits->min_degree; d <= limits->max_degree && status == HCP_OK; d++)
    if (hcp__degree_allowed(limits, p->cost, d))
      status = try_degree(p, d, effort, best, &least, err);
  return status;
}
