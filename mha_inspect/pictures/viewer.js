"use strict";
(() => {
  const root = document.querySelector(".mha-viewer");
  const { attentions, tokens, colours, first } = JSON.parse(document.getElementById("mha-viewer-data").textContent);
  const at = (selector) => root.querySelector(selector);
  const control = (name) => at(`[name=${name}]`);
  const make = (tag, properties, ...inside) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...inside);
    return element;
  };
  const picture = at(".picture"), heads = at(".heads"), ribbons = at(".ribbons");
  root.classList.toggle("framed", window.parent !== window);
  const EDGE = 64; // cells along a side of a thumbnail
  const chosen = { ...first };
  let cell = null; // row and column of the cell that is read

  // -- the numbers of a head, -Infinity where a mask is -------------------------------------------------------------

  const attention = () => attentions[chosen.attention];
  const flow = () => attention().flow || { stages: [], heads: 0, kv_heads: 0 };
  const stages = () => attention().stages;
  const current = () => stages().find((stage) => stage.stage === chosen.stage) || stages().at(-1);
  const headNames = () => (stages().length ? current().heads : Array.from({ length: flow().heads }, (_, i) => `head ${i}`));

  // Code 0 is masked, the two highest are inf and NaN, and those between are the numbers of a head in equal steps.
  function numbers(stage, head) {
    if (!stage.codes) {
      const bytes = Uint8Array.from(atob(stage.data), (character) => character.charCodeAt(0));
      stage.codes = stage.bits === 16 ? new Uint16Array(bytes.buffer) : bytes;
      stage.data = null;
    }
    if (stage.last && stage.last.head === head) return stage.last.values; // a pointer asks for one head again and again
    const size = stage.cells[0] * stage.cells[1], most = 2 ** stage.bits - 3;
    const low = stage.low[head], step = (stage.high[head] - low) / (most - 1);
    const values = Float32Array.from(stage.codes.subarray(head * size, (head + 1) * size), (code) => {
      if (code === 0) return -Infinity;
      if (code > most) return code === most + 1 ? Infinity : NaN;
      return low + (code - 1) * step;
    });
    stage.last = { head, values };
    return values;
  }

  // The largest number of each block of cells, of which there are at most 64 along a side.
  function thumbnail(stage, head) {
    stage.thumbnails = stage.thumbnails || [];
    if (!stage.thumbnails[head]) {
      const [rows, columns] = stage.cells, [high, wide] = stage.cells.map((size) => Math.ceil(size / EDGE));
      const size = [Math.ceil(rows / high), Math.ceil(columns / wide)];
      const largest = new Float32Array(size[0] * size[1]).fill(-Infinity);
      numbers(stage, head).forEach((number, i) => {
        const block = Math.floor(Math.floor(i / columns) / high) * size[1] + Math.floor((i % columns) / wide);
        largest[block] = Math.max(largest[block], number);
      });
      stage.thumbnails[head] = { numbers: largest, size };
    }
    return stage.thumbnails[head];
  }

  function written(number) {
    if (Number.isNaN(number)) return "NaN";
    if (!Number.isFinite(number)) return number > 0 ? "inf" : "masked";
    const small = number !== 0 && Math.abs(number) < 1e-4;
    return small ? number.toExponential(3) : String(Number(number.toPrecision(4)));
  }

  // -- colours ------------------------------------------------------------------------------------------------------

  const NAN = 0xffff00ff, INFINITE = 0xffffffff;
  const tables = colours.map((hex) =>
    Array.from({ length: 256 }, (_, i) => {
      const [red, green, blue] = [0, 2, 4].map((place) => parseInt(hex.substr(6 * i + place, 2), 16));
      return 0xff000000 | (blue << 16) | (green << 8) | red; // as a pixel lies in memory
    })
  );

  // The numbers that the first and the last colour stand for.
  function ends({ scale: [low, high] }) {
    return ["from", "to"].map((name) => low + ((high - low) * control(name).value) / 1000);
  }

  function paint(canvas, stage, values, [rows, columns]) {
    const pixels = new ImageData(columns, rows), out = new Uint32Array(pixels.data.buffer);
    const [low, high] = ends(stage), table = tables[Number(stage.signed)], width = high - low || 1;
    values.forEach((number, i) => {
      if (number === -Infinity) return; // masked: the hatched ground is seen
      const place = Math.floor(((number - low) / width) * 256);
      if (number === Infinity || Number.isNaN(number)) out[i] = number === Infinity ? INFINITE : NAN;
      else out[i] = table[Math.min(Math.max(place, 0), 255)];
    });
    [canvas.width, canvas.height] = [columns, rows];
    canvas.getContext("2d").putImageData(pixels, 0, 0);
  }

  // A NaN is told apart by more than its colour: a cross of five dots, in cells of three pixels.
  function cross(values, [rows, columns]) {
    const context = picture.getContext("2d"), plain = make("canvas", { width: columns, height: rows });
    plain.getContext("2d").drawImage(picture, 0, 0);
    [picture.width, picture.height] = [3 * columns, 3 * rows];
    context.imageSmoothingEnabled = false;
    context.drawImage(plain, 0, 0, 3 * columns, 3 * rows);
    values.forEach((number, i) => {
      if (!Number.isNaN(number)) return;
      for (const dot of [0, 2, 4, 6, 8])
        context.fillRect(3 * (i % columns) + (dot % 3), 3 * Math.floor(i / columns) + Math.floor(dot / 3), 1, 1);
    });
  }

  function recolour() {
    const stage = current(), values = numbers(stage, chosen.head), bar = new ImageData(256, 1);
    ends(stage).forEach((end, i) => {
      at([".low", ".high"][i]).textContent = written(end);
      control(["from", "to"][i]).setAttribute("aria-valuetext", written(end));
    });
    new Uint32Array(bar.data.buffer).set(tables[Number(stage.signed)]);
    at(".bar").getContext("2d").putImageData(bar, 0, 0);
    [...heads.querySelectorAll("canvas")].forEach((canvas, head) => {
      const small = thumbnail(stage, head);
      paint(canvas, stage, small.numbers, small.size);
    });
    paint(picture, stage, values, stage.cells);
    if (Math.max(...stage.cells) < 200 && values.some(Number.isNaN)) cross(values, stage.cells);
  }

  // -- what stands beside the picture, and what is read off it ------------------------------------------------------

  function labels(stage, side) {
    const names = tokens[stage.axes[side]] || [];
    return names.length === stage.size[side] ? names : null;
  }

  function ticks() {
    const stage = current();
    [".down", ".across"].forEach((selector, side) => {
      const names = labels(stage, side), count = stage.cells[side], place = ["top", "left"][side];
      const room = [picture.clientHeight / 16, picture.clientWidth / (names ? 16 : 44)][side];
      const apart = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128].find((n) => count / n <= room) || count;
      const shown = Array.from({ length: Math.ceil(count / apart) }, (_, i) => i * apart);
      const texts = shown.map((index) => (names || [])[index * stage.block[side]] || String(index * stage.block[side]));
      at(selector).style.setProperty("--longest", Math.max(...texts.map((text) => text.length)));
      at(selector).classList.toggle("named", Boolean(names));
      at(selector).replaceChildren(
        ...shown.map((index, i) => {
          const tick = make("span", { textContent: texts[i] });
          tick.style[place] = `${(100 * (index + 0.5)) / count}%`;
          return tick;
        })
      );
    });
  }

  function place(stage, side, index) {
    const size = stage.block[side], start = index * size, last = Math.min(start + size, stage.size[side]) - 1;
    const names = labels(stage, side), name = names ? ` “${names[start]}”${last > start ? "…" : ""}` : "";
    return `${stage.axes[side]} ${start}${last > start ? "–" + last : ""}${name}`;
  }

  // The row that is listed before a cell is chosen: of those with the most unmasked numbers, that with the largest.
  function strongest() {
    const [rows, width] = current().cells, values = numbers(current(), chosen.head);
    const finite = Array.from({ length: rows }, (_, row) => values.subarray(row * width, (row + 1) * width).filter(Number.isFinite));
    const longest = Math.max(...finite.map((row) => row.length));
    const largest = finite.map((row) => (row.length === longest ? row.reduce((one, other) => Math.max(one, other), -Infinity) : -Infinity));
    return Math.max(largest.indexOf(Math.max(...largest)), 0);
  }

  const MOST = 5; // the largest numbers of a row that are listed

  function most(row) {
    const stage = current(), width = stage.cells[1], values = [...numbers(stage, chosen.head).subarray(row * width, (row + 1) * width)];
    const order = values.map((_, column) => column).filter((column) => Number.isFinite(values[column]));
    order.sort((one, other) => values[other] - values[one]);
    at(".of").textContent = `${stage.heads[chosen.head]}, ${place(stage, 0, row)}: the largest ${stage.stage}`;
    const largest = Math.max(values[order[0]], Number.MIN_VALUE);
    at(".most").replaceChildren(
      ...order.slice(0, MOST).map((column) => {
        const share = make("span", { className: "share" });
        share.style.setProperty("--part", `${100 * Math.max(values[column] / largest, 0)}%`);
        const value = make("span", { className: "value", textContent: written(values[column]) });
        return make("li", {}, make("span", { textContent: place(stage, 1, column) }), share, value);
      })
    );
  }

  function read(chosenCell) {
    const stage = current(), [rows, columns] = stage.cells, marker = at(".cell");
    cell = chosenCell && chosenCell[0] < rows && chosenCell[1] < columns ? chosenCell : null;
    marker.hidden = !cell;
    most(cell ? cell[0] : strongest());
    if (!cell) {
      at(".read").textContent = `${stage.stage}, ${stage.heads[chosen.head]}`;
      return;
    }
    const [row, column] = cell, value = numbers(stage, chosen.head)[row * columns + column];
    const where = { top: row / rows, left: column / columns, height: 1 / rows, width: 1 / columns };
    for (const [side, share] of Object.entries(where)) marker.style[side] = `${100 * share}%`;
    const largest = stage.block[0] * stage.block[1] > 1 && Number.isFinite(value) ? "at most " : "";
    at(".read").textContent = `${place(stage, 0, row)}, ${place(stage, 1, column)}: ${largest}${written(value)}`;
  }

  // -- from input to output -----------------------------------------------------------------------------------------

  const PROJECTED = { q_proj: ["W_q", "query"], k_proj: ["W_k", "key"], v_proj: ["W_v", "value"], output: ["W_o", "concat"] };
  const INPUTS = ["query", "key", "value"], MERGED = ["concat", "output"];

  const hue = (head, count) => Math.round(30 + (360 * head) / count) % 360;

  function coloured(element, head, count) {
    element.style.setProperty("--hue", hue(head, count));
    return element;
  }

  const named = (name) => flow().stages.find((stage) => stage.name === name);
  const pieces = (texts) => texts.map(([text, axis]) => (axis ? make("span", { className: `axis-${axis}`, textContent: text }) : text));
  const shape = (stage) => make("span", { className: "shape" }, ...pieces(stage.shape));

  // The heads that a band is of: several for a key head that they share, none if that is not known.
  const headsOf = (band) => (band.dataset.heads ? band.dataset.heads.split(" ").map(Number) : []);

  // The features of a stage, a band for each head, or for each key head in the colours of the heads that share it.
  function bands(stage, sideways) {
    const { of, runs } = stage.bands, box = make("div", { className: sideways ? "bands sideways" : "bands" });
    box.classList.toggle("dense", runs.length > 8);
    box.classList.toggle("many", runs.length > 24);
    let first = 0;
    for (const [head, size] of runs) {
      const band = make("span", { className: "band" });
      band.style.setProperty("--share", size);
      band.dataset.first = first;
      band.dataset.last = (first += size) - 1;
      const whose = of === "heads" ? [head] : flow().shared[head] || [];
      band.dataset.of = of === "heads" ? `head ${head}` : `key head ${head}`;
      band.dataset.heads = whose.join(" ");
      const stops = whose.map((one, i) => `oklch(var(--light) .14 ${hue(one, flow().heads)}) ${i / whose.length * 100}% ${(i + 1) / whose.length * 100}%`);
      if (stops.length) band.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
      box.append(band);
    }
    return box;
  }

  // A box of a stage. A projection is named after its weight, and says how many features it reads and makes.
  function box(stage) {
    const [weight, source] = PROJECTED[stage.name] || [], read = weight && named(source);
    const title = make("span", {}, make("b", { textContent: weight || stage.name }));
    if (read && read.width && stage.width) title.append(make("span", { className: "size", textContent: `  ${read.width} → ${stage.width}` }));
    const button = make("button", { type: "button", className: "stage" }, title);
    button.dataset.stage = stage.name;
    const columns = stage.name === "output" && read && read.bands ? read : null;
    if (columns || stage.bands) button.append(bands(columns || stage, Boolean(columns)));
    const size = make("span", { className: "size" }, weight ? `${stage.name} ` : "", shape(stage));
    button.append(size);
    return button;
  }

  // In self attention query, key and value are one box, x.
  function inputs() {
    const given = INPUTS.map(named).filter(Boolean);
    if (!flow().is_self || !given.length) return given.map(box);
    const names = given.map((stage) => {
      const step = make("button", { type: "button", className: "step flat", textContent: stage.name });
      step.dataset.stage = stage.name;
      return step;
    });
    const whole = box(given[0]);
    whole.querySelector("b").textContent = "x";
    return [whole, make("div", { className: "steps" }, ...names)];
  }

  function steps() {
    const elsewhere = [...INPUTS, ...Object.keys(PROJECTED), ...MERGED], drawn = stages().map((stage) => stage.stage);
    const inside = flow().stages.map((stage) => stage.name).filter((name) => !elsewhere.includes(name));
    const all = [...new Set([...inside, ...drawn])];
    return all.map((name) => {
      const stage = named(name), button = make("button", { type: "button", className: "step" }, name);
      if (stage) button.append(shape(stage));
      button.dataset.stage = name;
      if (drawn.includes(name)) button.setAttribute("aria-pressed", String(name === current().stage));
      else button.classList.add("flat");
      return button;
    });
  }

  function showFlow() {
    at(".inputs").replaceChildren(...inputs());
    at(".projections").replaceChildren(...["q_proj", "k_proj", "v_proj"].map(named).filter(Boolean).map(box));
    at(".merged").replaceChildren(...MERGED.map(named).filter(Boolean).map(box));
    at(".steps[role]").replaceChildren(...steps());
    for (const column of root.querySelectorAll(".flow > .column")) column.hidden = !column.querySelector("button, canvas");
    at(".flow").style.gridTemplateColumns = flow().stages.length ? "" : "minmax(0, 1fr)";
  }

  function mark() {
    for (const band of root.querySelectorAll(".band")) band.classList.toggle("of-chosen", headsOf(band).includes(chosen.head));
  }

  // A curve from one box to another: to the right, or downwards where they stand one below the other. It ends at a
  // share of the height of the other, in the colour of a head if one is given.
  function curve(from, to, head, share = 0.5) {
    const start = from.getBoundingClientRect(), end = to.getBoundingClientRect(), whole = at(".flow").getBoundingClientRect();
    const overlap = end.left < start.right && end.right > start.left;
    const down = end.top >= start.bottom - 1 && (overlap || matchMedia("(max-width: 52rem)").matches);
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const x = [down ? (start.left + start.right) / 2 : start.right, down ? (end.left + end.right) / 2 : end.left];
    const y = [down ? start.bottom : (start.top + start.bottom) / 2, down ? end.top : end.top + share * end.height];
    const [x0, x1] = x.map((value) => value - whole.left), [y0, y1] = y.map((value) => value - whole.top);
    const [bx, by] = down ? [0, (y1 - y0) / 2] : [(x1 - x0) / 2, 0];
    path.setAttribute("d", `M${x0},${y0}C${x0 + bx},${y0 + by} ${x1 - bx},${y1 - by} ${x1},${y1}`);
    if (head !== undefined) {
      path.classList.add("of-head");
      path.classList.toggle("of-chosen", head === chosen.head);
      coloured(path, head, flow().heads);
    }
    return path;
  }
  const SHARES = [0.2, 0.5, 0.8]; // where the curves of W_q, W_k and W_v meet a head
  const MOST_CURVES = 16; // heads with a curve each; of more, only the chosen one has

  function curves() {
    const drawn = [], late = [], middle = at(".middle"), x = at(".inputs .stage");
    const boxes = [...root.querySelectorAll(".projections .stage")];
    for (const stage of boxes) {
      const own = flow().is_self ? x : at(`.inputs [data-stage=${PROJECTED[stage.dataset.stage][1]}]`);
      if (own) drawn.push(curve(own, stage));
    }
    const concat = at(".merged [data-stage=concat]"), output = at(".merged [data-stage=output]");
    if (output) drawn.push(curve(concat || middle, output));
    for (const stage of [...boxes, concat].filter(Boolean)) {
      const parts = [...stage.querySelectorAll(".band")].flatMap((band) => headsOf(band).map((head) => [band, head]));
      const isLast = stage === concat;
      if (!parts.length) drawn.push(isLast ? curve(middle, stage) : curve(stage, middle));
      for (const [band, head] of parts) {
        const card = heads.children[head];
        if (!card || (flow().heads > MOST_CURVES && head !== chosen.head)) continue;
        const line = isLast ? curve(card, band, head) : curve(band, card, head, SHARES[boxes.indexOf(stage)]);
        (head === chosen.head ? late : drawn).push(line);
      }
    }
    ribbons.replaceChildren(...drawn, ...late);
  }

  // Say what a stage is: its shape, its axes, how it is computed, and for a band which features are of which head.
  function describe(name, band) {
    const stage = named(name), card = at(".card");
    card.hidden = !flow().stages.length;
    if (!stage) return card.replaceChildren(name);
    const said = [make("b", { textContent: stage.name }), " ", shape(stage), "  ", make("code", {}, ...pieces(stage.axes)), make("br")];
    if (stage.formula) said.push(make("code", { textContent: stage.formula }), "  ");
    if (band) {
      const { of, first, last } = band.dataset, shares = headsOf(band);
      const whose = shares.length > 1 ? `${of}, which heads ${shares.join(", ")} share` : of;
      said.push(make("b", { textContent: `${whose}: features ${first}–${last}` }), "  ");
    }
    if (stage.source) said.push(make("span", { className: "quiet", textContent: stage.source }));
    card.replaceChildren(...said);
  }

  function pointOut(event) {
    const stage = event.target.closest("[data-stage]");
    describe(stage ? stage.dataset.stage : shownStage(), stage && event.target.closest(".band"));
  }
  const shownStage = () => (stages().length ? current().stage : "weights");
  for (const kind of ["pointerover", "focusin"]) at(".flow").addEventListener(kind, pointOut);
  at(".flow").addEventListener("pointerleave", () => describe(shownStage()));
  at(".flow").addEventListener("click", (event) => {
    pointOut(event); // a finger points at nothing before, and some browsers give no focus for it
    const stage = event.target.closest("[data-stage]"), band = event.target.closest(".band");
    const [head] = band ? headsOf(band) : [];
    if (head < headNames().length) {
      const { stage: name } = stage.dataset, index = [...band.parentNode.children].indexOf(band);
      go({ head });
      return describe(name, at(`.flow [data-stage=${name}]`).querySelectorAll(".band")[index]);
    }
    if (stage && stages().some((one) => one.stage === stage.dataset.stage)) {
      range(0, 1000, { stage: stage.dataset.stage });
      at(`.flow [data-stage=${stage.dataset.stage}]`).focus();
    }
  });

  // -- all heads of all attentions, a row for each attention ---------------------------------------------------------

  const all = at(".all"), drawnIn = (one) => one.stages.find((stage) => stage.stage === chosen.stage) || one.stages.at(-1);

  function small(index, head, name) {
    const stage = drawnIn(attentions[index]), canvas = make("canvas", { className: "thumb" });
    const shown = thumbnail(stage, head), button = make("button", { type: "button", title: `${name}, ${stage.heads[head]}` }, canvas);
    paint(canvas, stage, shown.numbers, shown.size);
    button.setAttribute("aria-label", button.title);
    button.setAttribute("aria-pressed", String(index === chosen.attention && head === chosen.head));
    button.addEventListener("click", () => go({ attention: index, head }));
    return button;
  }

  function showAll() {
    all.hidden = attentions.length < 2 || !stages().length;
    if (all.hidden || !all.open) return;
    const rows = attentions.flatMap((one, index) => {
      if (!one.stages.length) return [];
      const thumbs = drawnIn(one).heads.map((_, head) => small(index, head, one.name));
      return [make("p", { textContent: one.name }), make("div", { className: "row" }, ...thumbs)];
    });
    at(".grid").replaceChildren(...rows);
  }
  all.addEventListener("toggle", showAll);

  // -- what is chosen -----------------------------------------------------------------------------------------------

  const counts = [...new Set(attentions.map((one) => one.count))].filter((count) => count !== null);
  const beside = () => attentions.map((_, place) => place).filter((place) => attentions[place].count === attention().count);

  function fill(select, names, value) {
    select.replaceChildren(...names.map(([place, name]) => make("option", { value: place, textContent: name })));
    select.value = String(value);
  }

  function showChoice() {
    const places = beside();
    at(".which").hidden = places.length < 2;
    fill(control("attention"), places.map((place) => [place, attentions[place].name]), chosen.attention);
    at(".counts").hidden = counts.length < 2;
    at(".count").textContent = attention().count;
    at(".features").textContent = flow().head_dim ? `× head_dim ${flow().head_dim}` : "";
    control("count").max = counts.length - 1;
    control("count").value = counts.indexOf(attention().count);
    control("count").setAttribute("aria-valuetext", `${attention().count} heads`);
    at(".scale").replaceChildren(...counts.map((count) => make("span", { textContent: count })));
  }

  const COLUMNS = [[8, 4], [12, 6], [16, 8], [Infinity, 10]]; // up to so many heads, so many beside each other

  function showHeads() {
    const names = headNames(), drawn = stages().length > 0;
    const [, columns] = COLUMNS.find(([most]) => names.length <= most);
    heads.style.setProperty("--columns", Math.min(columns, names.length));
    heads.classList.toggle("few", names.length <= 4);
    heads.classList.toggle("many", names.length > 16);
    heads.replaceChildren(
      ...names.map((name, head) => {
        const label = make("span", { className: "name", textContent: name });
        const button = coloured(make("button", { type: "button" }), head, names.length);
        if (drawn) button.append(make("canvas", { className: "thumb", ariaHidden: "true" }));
        button.append(label);
        button.setAttribute("aria-pressed", String(head === chosen.head));
        button.tabIndex = head === chosen.head ? 0 : -1;
        button.addEventListener("click", () => go({ head }, true));
        return button;
      })
    );
  }

  function showMap() {
    const stage = current(), [rows, columns] = stage.cells, { size, axes } = stage;
    at(".notes").textContent = stage.notes.join(" ");
    at(".signs").replaceChildren(
      ...stage.signs.map(([kind, text]) => make("span", { className: `sign ${kind}`, textContent: text }))
    );
    const places = `${size[0]} places of ${axes[0]} by ${size[1]} of ${axes[1]}`;
    picture.setAttribute("aria-label", `${stage.stage}, ${stage.heads[chosen.head]}: ${places}`);
    at(".rows").textContent = `← ${axes[0]}`;
    at(".columns").textContent = `${axes[1]} →`;
    at(".plot").style.setProperty("--ratio", Math.max(columns / rows, 0.25));
    at(".map").style.setProperty("--least", `${Math.min(16 * rows, 160)}px`);
    coloured(at(".most"), chosen.head, stage.heads.length);
    recolour();
    ticks();
    read(cell);
  }

  function show() {
    const drawn = stages().length > 0;
    if (drawn) chosen.stage = current().stage;
    chosen.head = Math.min(chosen.head, headNames().length - 1);
    showChoice();
    showFlow();
    showHeads();
    at(".chosen").hidden = !drawn;
    if (drawn) showMap();
    describe(shownStage());
    mark();
    curves();
    showAll();
  }

  function go(change, focuses) {
    const focused = focuses || heads.contains(document.activeElement);
    Object.assign(chosen, change);
    show();
    if (focused) heads.children[chosen.head].focus();
  }

  function range(from, to, change) {
    [control("from").value, control("to").value] = [from, to];
    if (change) go(change);
    else recolour();
  }

  control("attention").addEventListener("change", (event) => go({ attention: Number(event.target.value) }));
  control("count").addEventListener("input", (event) => {
    const place = beside().indexOf(chosen.attention), count = counts[Number(event.target.value)];
    const same = attentions.map((_, index) => index).filter((index) => attentions[index].count === count);
    go({ attention: same[Math.min(place, same.length - 1)] });
  });
  control("from").addEventListener("input", () => {
    const to = Number(control("to").value);
    range(Math.min(control("from").value, to - 1), to);
  });
  control("to").addEventListener("input", () => {
    const from = Number(control("from").value);
    range(from, Math.max(control("to").value, from + 1));
  });
  control("whole").addEventListener("click", () => range(0, 1000));

  function point(event) {
    if (event.target !== picture) return read(null);
    const [rows, columns] = current().cells;
    const share = [event.offsetY / picture.clientHeight, event.offsetX / picture.clientWidth];
    read([Math.floor(share[0] * rows), Math.floor(share[1] * columns)].map((index) => Math.max(index, 0)));
  }
  at(".plot").addEventListener("pointermove", point);
  at(".plot").addEventListener("pointerdown", point);

  const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  function onArrow(element, act) {
    element.addEventListener("keydown", (event) => {
      const move = MOVES[event.key];
      if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act(move);
    });
  }
  onArrow(picture, (move) => {
    const from = cell || [-move[0], -move[1]];
    read(from.map((index, side) => Math.min(Math.max(index + move[side], 0), current().cells[side] - 1)));
  });
  onArrow(heads, ([down, across]) => {
    const what = across ? "head" : "attention", count = across ? headNames().length : attentions.length;
    go({ [what]: (chosen[what] + down + across + count) % count });
  });

  new ResizeObserver(() => {
    if (stages().length) ticks();
    curves();
  }).observe(root);
  heads.addEventListener("scroll", curves);
  show();
})();
