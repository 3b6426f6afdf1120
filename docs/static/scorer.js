// Weights of the search: Sphinx's own, times what a page is for. Pages that answer a newcomer's question come
// first; lists, figures and the log of experiments last.
var Rooms = [
  [/^howto\//, 3],
  [/^start\//, 2.8],
  [/^(engine|profiling)$/, 2.6],
  [/^(huggingface|layers|backends|compat|words)$/, 2],
  [/^(log\/|results|architectures|encoder|vision-language|notebooks\/)/, 0.25],
];
var Scorer = {
  score: ([page, , , , score]) => score * (Rooms.find(([room]) => room.test(page)) || [0, 1])[1],
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
