/* The order of what a search finds: how to use it, the manual, the course and the notes, the rest; diffs last. */
const PLACES = [/^(use|api)$/, /^[^/]+$/, /^(course|notes)\//, /^(?!generated\/stack\/)/];
var Scorer = {
  score: ([page, , , , score]) => {
    const place = PLACES.findIndex((pages) => pages.test(page));
    return score - 1000 * (place < 0 ? PLACES.length : place);
  },
  // Sphinx's own numbers, which it lacks once there is a Scorer.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
