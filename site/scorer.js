/* The order of what a search finds: the page that is called so, how to use it, the manual, the course and the notes, the
   rest; diffs last. */
const PLACES = [/^(use|api)$/, /^[^/]+$/, /^(course|notes)\//, /^(?!generated\/stack\/)/];
const asked = (new URLSearchParams(location.search).get("q") ?? "").trim().toLowerCase();
var Scorer = {
  score: ([page, title, , , score]) => {
    const called = title.replace(/^\d+\. /, "").toLowerCase() === asked;
    const place = called ? -1 : PLACES.findIndex((pages) => pages.test(page));
    return score - 1000 * (place < 0 && !called ? PLACES.length : place);
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
// An excerpt has dots in place of a formula, of which a page's source has the TeX.
document.addEventListener("DOMContentLoaded", () => {
  const text = Search.htmlToText;
  const formula = /<(span|div) class="math[^>]*>[\s\S]*?<\/\1>/g;
  Search.htmlToText = (html, anchor) => text(html.replace(formula, " … "), anchor);
});
