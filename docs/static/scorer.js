// Weights of the search: Sphinx's own, but that the log of experiments comes behind the pages for users.
var Scorer = {
  score: ([page, , , , score]) => (page.startsWith("log/") ? score / 4 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
