// Shows what `energon preview --html` wrote: data/*.js call preview.take(kind, number, value) when they are loaded. The
// report of a run is these pages in one file, with one view.
//
// Text of the data is only ever set by textContent, addresses only ever have numbers in them. A page of samples is one
// file; the texts that a search looks through are loaded when somebody searches.
"use strict";

const preview = (() => {
  const waiting = new Map();
  const loaded = new Map();
  const KEPT = 24; // files of samples that stay in memory
  const HUES = 8; // colours of datasets, in turn
  let meta = null;

  // Loading --------------------------------------------------------------------------------------------------------

  function take(kind, number, value) {
    if (kind === "meta") {
      meta = value;
      start();
      return;
    }
    const name = `${kind}-${number}`;
    loaded.set(name, value);
    const done = waiting.get(name);
    waiting.delete(name);
    if (done) done.resolve(value);
    if (kind === "samples") {
      const held = [...loaded.keys()].filter((key) => key.startsWith("samples-"));
      for (const key of held.slice(0, Math.max(0, held.length - KEPT))) loaded.delete(key);
    }
  }

  function load(kind, number) {
    const name = `${kind}-${number}`;
    if (loaded.has(name)) return Promise.resolve(loaded.get(name));
    if (waiting.has(name)) return waiting.get(name).promise;
    const entry = {};
    entry.promise = new Promise((resolve, reject) => Object.assign(entry, { resolve, reject }));
    waiting.set(name, entry);
    const script = document.createElement("script");
    script.src = `data/${name}.js`;
    script.onload = () => script.remove();
    script.onerror = () => {
      waiting.delete(name);
      entry.reject(new Error(`data/${name}.js is missing from this folder`));
    };
    document.head.append(script);
    return entry.promise;
  }

  async function sample(number) {
    const some = await load("samples", Math.floor(number / meta.per_file));
    return some[number % meta.per_file];
  }

  // Making elements ------------------------------------------------------------------------------------------------

  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
      else if (name === "grow") element.style.flexGrow = String(value);
      else element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  function drawing(tag, attributes, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  const number = (value) => value.toLocaleString("en");
  const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 2 : 1)} %`;
  const folder = (file) => `media/${String(Math.floor(file / 1000)).padStart(3, "0")}`;
  const address = (file, suffix) => `${folder(file)}/${String(file).padStart(6, "0")}.${suffix}`;

  function image(picture, attributes) {
    const [, file, width, height] = picture;
    const small = Math.max(width, height) < 160 ? "small" : "";
    return make("img", { src: address(file, "jpg"), alt: `picture, ${width} x ${height}`, loading: "lazy", class: small, ...attributes });
  }

  function figure(picture) {
    return make("figure", {}, image(picture), make("figcaption", {}, `${picture[2]} × ${picture[3]}`));
  }

  // An item is [kind, ...]: p picture (file, width, height), v video and a audio (file, suffix, text), r turn (role,
  // items), t text, j JSON, n note, u media that stayed bytes, e error.
  function itemElement(item, pictures) {
    const [kind, value] = item;
    if (kind === "p") return figure(item);
    if (kind === "v" || kind === "a") {
      const player = make(kind === "v" ? "video" : "audio", { src: address(value, item[2]), controls: "", preload: "metadata" });
      return make("figure", {}, player, make("figcaption", {}, item[3]));
    }
    if (kind === "j") return make("pre", {}, value);
    if (kind === "e" || kind === "u") return make("p", { class: "error" }, value);
    if (kind === "n") return make("p", { class: "quiet" }, value);
    if (kind === "r") {
      const role = ["user", "assistant", "system"].includes(value) ? value : "other";
      return make("div", { class: `turn ${role}` }, make("div", { class: "role" }, value), ...item[2].map((one) => itemElement(one, pictures)));
    }
    const box = make("div", { class: "text" });
    value.split("<image>").forEach((part, place) => {
      if (place) {
        const picture = pictures && pictures.shift();
        box.append(picture ? figure(picture) : "<image>");
      }
      box.append(part);
    });
    return box;
  }

  function flat(fields) {
    return fields.flatMap(([, items]) => items.flatMap((item) => (item[0] === "r" ? item[2] : [item])));
  }

  const picturesOf = (one) => flat(one.fields).filter((item) => item[0] === "p");

  function factList(pairs) {
    return make("dl", { class: "facts" }, ...pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  }

  // Tables and charts ----------------------------------------------------------------------------------------------

  // A cell is a text, or {text, title, hue: of a square before it, shares: [[from 0 to 1, hue]] as bars, keys,
  // links: [[text, address]] from our own code}.
  function cellElement(cell, right) {
    const { text, title, hue, shares, keys, links } = typeof cell === "string" ? { text: cell } : cell;
    const box = make("td", { class: right ? "number" : null, title }, hue === undefined ? null : make("span", { class: `swatch s${hue}` }), text);
    for (const [share, color] of shares || []) box.append(make("div", { class: "meter" }, make("div", { class: `s${color}`, grow: share }), make("div", { grow: 1 - share })));
    for (const key of keys || []) box.append(make("code", {}, key), " ");
    for (const [label, to] of links || []) box.append(make("a", { href: to }, label), " ");
    return box;
  }

  // {columns, right: numbers of columns that are aligned there, rows}
  function tableElement(table, id) {
    const right = (place) => table.right.includes(place);
    const head = table.columns.map((name, place) => make("th", { class: right(place) ? "number" : null }, name));
    const rows = table.rows.map((row) => make("tr", {}, ...row.map((cell, place) => cellElement(cell, right(place)))));
    return make("table", { id }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  }

  // Values over steps: {chart: what it is, low, high, percent, lines: [{name, hue, dashed, points: [[step, value]]}],
  // band: [[step, low, high]]}. Values above 0 can be shown on a logarithmic scale.
  function chartElement(spec, id) {
    const { chart, low, high, percent: asPercent, lines, band, log } = spec;
    const width = 900;
    const height = 160;
    const steps = lines.flatMap((line) => line.points.map(([step]) => step));
    const [first, last] = [Math.min(...steps), Math.max(...steps)];
    const x = (step) => (width * (last > first ? (step - first) / (last - first) : 0.5)).toFixed(1);
    const scaled = log ? Math.log : (value) => value;
    const y = (value) => (height * (1 - (scaled(value) - scaled(low)) / (scaled(high) - scaled(low) || 1))).toFixed(1);
    const short = (value) => (value && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6) ? Number(value.toPrecision(4)).toExponential().replace("+", "") : String(Number(value.toPrecision(4))));
    const shown = (value) => (asPercent ? `${(100 * value).toFixed(0)} %` : short(value));
    const box = drawing("svg", { viewBox: `-64 -12 ${width + 76} ${height + 34}`, role: "img", "aria-label": chart, ...(id ? { id } : {}) });
    for (const value of [low, log ? Math.sqrt(low * high) : (low + high) / 2, high]) {
      box.append(drawing("line", { class: "axis", x1: 0, x2: width, y1: y(value), y2: y(value) }));
      box.append(drawing("text", { x: -8, y: Number(y(value)) + 4, "text-anchor": "end" }, shown(value)));
    }
    const edges = (band || []).map(([step, , top]) => `${x(step)},${y(top)}`).concat((band || []).map(([step, bottom]) => `${x(step)},${y(bottom)}`).reverse());
    if (edges.length > 2) box.append(drawing("polygon", { class: "band", points: edges.join(" ") }));
    for (const { name, hue, dashed, points } of lines) {
      const line = drawing("polyline", { class: `line l${hue}${dashed ? " dashed" : ""}`, points: points.map(([step, value]) => `${x(step)},${y(value)}`).join(" ") });
      line.append(drawing("title", {}, name));
      box.append(line);
      if (points.length === 1) box.append(drawing("circle", { r: 3, cx: x(points[0][0]), cy: y(points[0][1]) }));
    }
    box.append(drawing("text", { x: 0, y: height + 16 }, `step ${number(first)}`), drawing("text", { x: width, y: height + 16, "text-anchor": "end" }, `step ${number(last)}`));
    if (low > 0 && high > low && !asPercent) {
      const other = drawing("text", { class: "switch", x: width, y: -2, "text-anchor": "end", role: "button" }, log ? "linear scale" : "log scale");
      other.addEventListener("click", () => box.replaceWith(chartElement({ ...spec, log: !log }, id)));
      box.append(other);
    }
    readValues(box, lines, steps, x, shown, height);
    return box;
  }

  // Show the values of the step that the pointer is nearest to.
  function readValues(box, lines, steps, x, shown, height) {
    const mark = drawing("line", { class: "mark", y1: 0, y2: height, visibility: "hidden" });
    const told = drawing("text", { class: "told", x: 0, y: -2 });
    box.append(mark, told);
    box.addEventListener("pointerleave", () => {
      mark.setAttribute("visibility", "hidden");
      told.textContent = "";
    });
    box.addEventListener("pointermove", (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(box.getScreenCTM().inverse()).x;
      const nearest = steps.reduce((best, step) => (Math.abs(x(step) - at) < Math.abs(x(best) - at) ? step : best));
      const values = lines.flatMap(({ name, points }) => points.filter(([step]) => step === nearest).map(([, value]) => `${name} ${shown(value)}`));
      for (const end of ["x1", "x2"]) mark.setAttribute(end, x(nearest));
      mark.setAttribute("visibility", "visible");
      told.textContent = `step ${number(nearest)}: ${values.join(", ")}`;
    });
  }

  // Samples --------------------------------------------------------------------------------------------------------

  function card(one) {
    const items = flat(one.fields);
    const picture = picturesOf(one)[0];
    const text = items.find((item) => item[0] === "t" && item[1].trim()) || items.find((item) => !"peu".includes(item[0]));
    const excerpt = one.asked || one.said || (text ? String("va".includes(text[0]) ? text[3] : text[1]).slice(0, 240) : "");
    const bad = one.error || (items.find((item) => item[0] === "e" || item[0] === "u") || ["", ""])[1].slice(0, 240);
    return make(
      "a",
      { class: "card", href: `#/sample/${one.number}` },
      picture ? image(picture) : null,
      make(
        "div",
        {},
        make("div", { class: "key", title: one.key }, one.key),
        bad ? make("div", { class: "excerpt error" }, bad) : null,
        excerpt ? make("div", { class: "excerpt" }, excerpt) : null,
        one.asked && one.said ? make("div", { class: "excerpt said" }, one.said) : null,
      ),
    );
  }

  let found = { query: null, numbers: null };

  // Return the numbers of the samples that have the query in key or text and belong to the dataset; null: all.
  async function search(query, dataset, progress) {
    if (!query && dataset === "") return null;
    const name = JSON.stringify([query, dataset]);
    if (found.query === name) return found.numbers;
    const needle = query.toLowerCase();
    const numbers = [];
    for (let file = 0; file < meta.search_files; file += 1) {
      const [keys, texts, parts] = await load("search", file);
      for (let place = 0; place < keys.length; place += 1) {
        if (dataset !== "" && parts[place] !== Number(dataset)) continue;
        if (needle && !keys[place].toLowerCase().includes(needle) && !texts[place].toLowerCase().includes(needle)) continue;
        numbers.push(file * meta.per_search_file + place);
      }
      progress(file + 1);
    }
    found = { query: name, numbers };
    return numbers;
  }

  async function showSamples(main, options, current) {
    const query = options.get("q") || "";
    const dataset = options.get("d") || "";
    const note = make("span", { class: "quiet", id: "count" }, "");
    const go = (changes) => {
      const next = new URLSearchParams({ q: query, d: dataset, ...changes });
      for (const name of [...next.keys()]) if (!next.get(name)) next.delete(name);
      location.hash = `#/samples?${next}`;
    };
    const input = make("input", { type: "search", id: "search", placeholder: "Search keys and texts", "aria-label": "Search keys and texts" });
    input.value = query;
    input.addEventListener("change", () => go({ q: input.value.trim() }));
    const select = make("select", { id: "dataset", "aria-label": "Dataset" }, make("option", { value: "" }, "All datasets"));
    meta.parts.forEach((part, place) => select.append(make("option", { value: place }, part.name)));
    select.value = dataset;
    select.addEventListener("change", () => go({ d: select.value }));
    const bar = make("div", { class: "bar" }, input, meta.parts.length > 1 ? select : null, note);
    const grid = make("div", { class: "grid", id: "grid" });
    main.replaceChildren(bar, grid);
    const numbers = await search(query, dataset, (file) => {
      note.textContent = `searching… ${Math.round((100 * file) / meta.search_files)} %`;
    });
    if (!current()) return;
    const total = numbers ? numbers.length : meta.count;
    const pages = Math.max(1, Math.ceil(total / meta.per_file));
    const page = Math.min(pages, Math.max(1, Number(options.get("page")) || 1));
    const first = (page - 1) * meta.per_file;
    const shown = [];
    for (let place = first; place < Math.min(total, first + meta.per_file); place += 1) shown.push(numbers ? numbers[place] : place);
    const samples = await Promise.all(shown.map(sample));
    if (!current()) return;
    grid.replaceChildren(...samples.map(card));
    note.textContent = numbers ? `${number(total)} of ${number(meta.count)} samples` : `${number(total)} samples`;
    if (!total) grid.replaceChildren(make("p", { class: "quiet" }, "No sample has that in its key or text."));
    const turn = (to, label, id) => {
      const button = make("button", { type: "button", id, on: { click: () => go({ page: to }) } }, label);
      button.disabled = to < 1 || to > pages;
      return button;
    };
    const place = make("span", { class: "quiet", id: "page" }, `page ${number(page)} of ${number(pages)}`);
    bar.append(make("span", { class: "push bar-pages" }, turn(page - 1, "← Previous", "previous"), " ", place, " ", turn(page + 1, "Next →", "next")));
  }

  function factsOf(one) {
    const facts = [["dataset", meta.parts[one.part].name], ["shard", one.shard], ["sample", number(one.index)], ["bytes", one.size ? number(one.size) : ""]];
    return [...facts, ...one.facts.map(([name, value]) => [name, number(value)])].filter(([, value]) => value);
  }

  async function showSample(main, which, current) {
    const one = await sample(which);
    if (!current()) return;
    if (!one) throw new Error(`there is no sample ${which}`);
    const link = (to, label) => make("button", { type: "button", on: { click: () => { location.hash = `#/sample/${to}`; } } }, label);
    const previous = link(which - 1, "← Previous");
    const next = link(which + 1, "Next →");
    previous.disabled = which === 0;
    next.disabled = which + 1 >= meta.count;
    const conversation = one.fields.some(([, items]) => items.some((item) => item[0] === "r"));
    const pictures = conversation ? picturesOf(one).slice() : null;
    main.replaceChildren(
      make("div", { class: "bar" }, make("a", { href: `#/samples?page=${Math.floor(which / meta.per_file) + 1}` }, "All samples"), make("span", { class: "push" }, previous, " ", next)),
      make("h2", { id: "key", class: "text" }, one.key),
      factList(factsOf(one)),
    );
    if (one.error) main.append(make("p", { class: "error" }, one.error));
    for (const [name, items] of one.fields) {
      main.append(make("section", { class: "panel" }, make("h3", {}, name), ...items.map((item) => itemElement(item, pictures))));
    }
  }

  const TROUBLES = {
    error: "did not load",
    broken: "with a broken picture, sound or other value",
    undecoded: "with pictures or other media that no decoder took",
  };

  // Overview -------------------------------------------------------------------------------------------------------

  function histogram(entry) {
    if (entry.edges[1] - entry.edges[0] === 1 && entry.counts.length === 1) {
      return make("figure", { class: "panel chart" }, make("h3", {}, entry.name), make("p", { class: "text" }, `all ${number(entry.edges[0])}`));
    }
    const width = 420;
    const height = 150;
    const top = Math.max(...entry.counts);
    const step = width / entry.counts.length;
    const chart = drawing("svg", { viewBox: `0 0 ${width} ${height + 18}`, role: "img" });
    entry.counts.forEach((count, place) => {
      const tall = count ? Math.max(1, (height * count) / top) : 0;
      const shape = drawing("rect", { class: "bar-shape", x: place * step + 0.5, y: height - tall, width: Math.max(1, step - 1), height: tall });
      shape.append(drawing("title", {}, `${number(entry.edges[place])} to ${number(entry.edges[place + 1])}: ${number(count)}`));
      chart.append(shape);
    });
    chart.append(drawing("line", { class: "axis", x1: 0, x2: width, y1: height + 0.5, y2: height + 0.5 }));
    chart.append(drawing("text", { x: 0, y: height + 14 }, number(entry.edges[0])));
    chart.append(drawing("text", { x: width, y: height + 14, "text-anchor": "end" }, number(entry.edges[entry.edges.length - 1])));
    const facts = `median ${number(entry.median)}, mean ${number(entry.mean)}, 95 % up to ${number(entry.p95)}${entry.log ? " · logarithmic" : ""}`;
    return make("figure", { class: "panel chart" }, make("h3", {}, entry.name), chart, make("figcaption", {}, facts));
  }

  function showOverview(main) {
    const rows = meta.parts.map((part, place) => {
      const hue = place % HUES;
      return [{ text: part.name, hue }, number(part.samples), number(part.shown), percent(part.share), { shares: [[part.share, hue]] }];
    });
    const table = tableElement({ columns: ["dataset", "samples", "shown here", "share of the draws", ""], right: [1, 2, 3], rows }, "shares");
    main.replaceChildren(make("h2", {}, "Datasets"), make("div", { class: "panel" }, table));
    for (const [kind, count, some] of meta.troubled) {
      const links = some.flatMap((one) => [" ", make("a", { href: `#/sample/${one}` }, number(one))]);
      main.append(make("p", { class: "error" }, `${number(count)} ${count === 1 ? "sample" : "samples"} ${TROUBLES[kind]}: number`, ...links, count > some.length ? " …" : null));
    }
    main.append(make("h2", {}, "Sizes of the samples shown"), make("div", { class: "charts" }, ...meta.histograms.map(histogram)));
    if (meta.plan) main.append(make("h2", {}, "The mix over a run"), make("div", { class: "panel" }, ...planElements(meta.plan)));
  }

  function planElements(plan) {
    const facts = [`${number(plan.steps)} steps of ${number(plan.ranks)} ${plan.ranks === 1 ? "rank" : "ranks"}, batch size ${plan.batch_size ?? "none"}: ${number(plan.draws)} samples`];
    if (plan.mixing !== null) facts.push(`mixing ${plan.mixing.toFixed(2)} (1 is a perfect shuffle)`);
    if (plan.first_end !== null) facts.push(`the first epoch of a dataset ends in step ${number(plan.first_end - 1)}`);
    const rows = plan.leaves.map((leaf, place) => [
      { text: meta.parts[place].name, hue: place % HUES },
      leaf.written || "–",
      ...[percent(leaf.share), number(leaf.draws), percent(plan.draws ? leaf.draws / plan.draws : 0), leaf.epochs.toFixed(2), leaf.mixing === null ? "–" : leaf.mixing.toFixed(2)],
    ]);
    const columns = ["dataset", "as written", "share at first", "samples drawn", "share drawn", "epochs", "mixing"];
    const shown = [make("p", {}, facts.join(" · ")), tableElement({ columns, right: [2, 3, 4, 5, 6], rows }, "plan")];
    if (!plan.schedule.length) return shown;
    // The shares of the datasets from step to step, where the weights of the mix move.
    const lines = meta.parts.map(({ name }, place) => ({ name, hue: place % HUES, points: plan.schedule.map(([step, shares]) => [step, shares[place]]) }));
    return [...shown, chartElement({ chart: "shares over the run", low: 0, high: 1, percent: true, lines }, "schedule")];
  }

  // The report of a run --------------------------------------------------------------------------------------------

  // A section is [title, blocks]; a block is a text, a table or a chart.
  function showRun(main) {
    const element = (block) => (typeof block === "string" ? make("p", { class: "quiet" }, block) : make("div", { class: "panel" }, block.chart ? chartElement(block) : tableElement(block)));
    main.replaceChildren(factList(meta.run.facts), ...meta.run.sections.flatMap(([title, blocks]) => [make("h2", {}, title), ...blocks.map(element)]));
  }

  // Batches --------------------------------------------------------------------------------------------------------

  const series = (dataset) => `s${meta.series.indexOf(dataset) < 0 ? 0 : meta.series.indexOf(dataset) % HUES}`;

  function legend() {
    const entry = (kind, text, meaning) => make("span", {}, make("span", { class: `token ${kind}` }, text), ` ${meaning}`);
    return make(
      "div",
      { class: "legend" },
      entry("learned", "token", "carries loss: the model learns to say what follows"),
      entry("special", "<s>", "special"),
      entry("image", "<image> × 16", "tokens of an image"),
      entry("padding", "× 8", "padding"),
    );
  }

  // A token is [kind, text, label, count].
  function tokenElements(tokens, start, pictures) {
    const runs = tokens.filter(([kind]) => kind === "image").length;
    const beside = runs === pictures.length ? pictures.slice() : [];
    let place = start;
    return tokens.map(([kind, text, label, count]) => {
      const at = count > 1 ? `tokens ${place} to ${place + count - 1}` : `token ${place}`;
      place += count;
      const learned = label !== null;
      const title = learned ? `${at}, learns ${JSON.stringify(label)}` : at;
      const element = make("span", { class: `token ${kind}${learned ? " learned" : ""}`, title });
      if (kind === "image") {
        if (beside.length) element.append(image(beside.shift(), { class: "" }));
        element.append(`${text} × ${count}`);
      } else {
        element.append(text.replaceAll("\n", "⏎\n"));
      }
      return element;
    });
  }

  async function segmentElement(segment) {
    const source = segment.sample === null ? null : await sample(segment.sample);
    const pictures = segment.pictures.length ? segment.pictures : source ? picturesOf(source) : [];
    const title = make("div", { class: "key" }, make("span", { class: `swatch ${series(segment.dataset)}` }));
    title.append(source ? make("a", { href: `#/sample/${segment.sample}` }, segment.key) : segment.key);
    title.append(` · ${segment.dataset}${segment.length ? ` · tokens ${segment.start} to ${segment.start + segment.length - 1}` : ""}`);
    const box = make("div", { class: "segment" }, title);
    const spread = segment.tokens.filter(([kind]) => kind === "image").length !== pictures.length;
    if (spread && segment.tokens.length) box.append(...pictures.map((picture) => image(picture, { class: "beside", height: 48 })));
    box.append(make("div", { class: "tokens" }, ...tokenElements(segment.tokens, segment.start, pictures)));
    return box;
  }

  async function rowElement(row, place) {
    const box = make("section", { class: `panel row${row.valid ? "" : " masked"}` });
    const facts = row.length ? `${number(row.length)} tokens, ${row.segments.length} ${row.segments.length === 1 ? "sample" : "samples"}, ${number(row.padding)} padding` : "";
    box.append(make("h3", {}, `Row ${place}${row.valid ? "" : " (masked: it is there for its shape alone)"}${facts ? `: ${facts}` : ""}`));
    if (row.length) {
      const bar = make("div", { class: "packbar" });
      let end = 0;
      const gap = (to) => { if (to > end) bar.append(make("div", { class: "padding", grow: to - end, title: `padding: ${to - end} tokens` })); };
      for (const segment of row.segments) {
        gap(segment.start);
        bar.append(make("div", { class: series(segment.dataset), grow: segment.length, title: `${segment.key}: ${segment.length} tokens` }, segment.key));
        end = segment.start + segment.length;
      }
      gap(row.length);
      box.append(bar);
    }
    for (const segment of row.segments) box.append(await segmentElement(segment));
    if (row.padding) box.append(make("div", { class: "tokens" }, make("span", { class: "token padding" }, `padding × ${row.padding}`)));
    if (row.samples.length) {
      const links = await Promise.all(row.samples.map(async (which) => make("a", { href: `#/sample/${which}` }, (await sample(which)).key)));
      box.append(make("h3", {}, row.samples.length === 1 ? "sample" : "samples"), make("p", { class: "key links" }, ...links.flatMap((link) => [link, " "])));
    }
    for (const [name, items] of row.fields) box.append(make("h3", {}, name), ...items.map((item) => itemElement(item, null)));
    return box;
  }

  async function showBatch(main, which, current) {
    const entry = meta.batches[which];
    if (!entry) throw new Error(`there is no batch ${which}`);
    const batch = await load("batch", which);
    const rows = [];
    for (let place = 0; place < batch.rows.length; place += 1) rows.push(await rowElement(batch.rows[place], place));
    if (!current()) return;
    const select = make("select", { id: "batch", "aria-label": "Batch" });
    meta.batches.forEach((one, place) => select.append(make("option", { value: place }, `step ${number(one.step)}, rank ${one.rank}${one.microbatch === null ? "" : `, microbatch ${number(one.microbatch)}`}`)));
    select.value = String(which);
    select.addEventListener("change", () => { location.hash = `#/batch/${select.value}`; });
    const facts = `${entry.kind} of ${batch.rows.length} ${batch.rows.length === 1 ? "row" : "rows"}${batch.rows.some((row) => row.valid) ? "" : ", masked"}${entry.inputs.length ? `, with ${entry.inputs.join(", ")}` : ""}`;
    main.replaceChildren(make("div", { class: "bar" }, select, make("span", { class: "quiet" }, facts)));
    if (batch.rows.some((row) => row.length)) main.append(legend());
    main.append(...rows);
  }

  // Where we are ---------------------------------------------------------------------------------------------------

  let turn = 0;

  async function show() {
    const mine = (turn += 1);
    const current = () => mine === turn;
    const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
    const [view, which] = path.split("/");
    const main = document.getElementById("main");
    const home = meta.batches.length ? "batch" : "samples";
    const active = view || home;
    for (const tab of document.querySelectorAll("#tabs a")) {
      const here = tab.dataset.view === (active === "sample" ? "samples" : active);
      if (here) tab.setAttribute("aria-current", "page");
      else tab.removeAttribute("aria-current");
    }
    delete main.dataset.ready;
    try {
      if (meta.run) showRun(main);
      else if (active === "overview") showOverview(main);
      else if (active === "batch") await showBatch(main, Number(which) || 0, current);
      else if (active === "sample") await showSample(main, Number(which) || 0, current);
      else await showSamples(main, new URLSearchParams(query || ""), current);
    } catch (error) {
      main.replaceChildren(make("p", { class: "error" }, error.message));
    }
    if (current()) main.dataset.ready = "yes";
  }

  function start() {
    document.title = `${meta.title} · energon preview`;
    document.getElementById("title").textContent = meta.title;
    document.getElementById("subtitle").textContent = meta.notes.join(" · ");
    const tabs = document.getElementById("tabs");
    const views = [["batch", "Batches"], ["samples", "Samples"], ["overview", "Overview"]];
    for (const [view, label] of views) {
      if (meta.run || (view === "batch" && !meta.batches.length)) continue;
      const tab = make("a", { href: `#/${view}` }, label);
      tab.dataset.view = view;
      tabs.append(tab);
    }
    window.addEventListener("hashchange", show);
    window.addEventListener("keydown", (event) => {
      if (["INPUT", "SELECT"].includes(event.target.tagName) || event.metaKey || event.ctrlKey || event.altKey) return;
      const button = { ArrowLeft: "← Previous", ArrowRight: "Next →" }[event.key];
      const target = [...document.querySelectorAll("main button")].find((one) => one.textContent === button);
      if (target && !target.disabled) target.click();
      if (event.key === "/" && document.getElementById("search")) {
        document.getElementById("search").focus();
        event.preventDefault();
      }
    });
    show();
  }

  return { take };
})();
