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
  const picture = at(".picture"), heads = at(".heads");
  const EDGE = 64; // cells along a side of a thumbnail
  const chosen = { ...first };
  let cell = null; // row and column of the cell that is read

  // -- the numbers of a head, -Infinity where a mask is -------------------------------------------------------------

  const stages = () => attentions[chosen.attention].stages;
  const current = () => stages().find((stage) => stage.stage === chosen.stage) || stages()[0];

  // Code 0 is masked, the two highest are inf and NaN, and those between are the numbers of a head in equal steps.
  function numbers(stage, head) {
    if (!stage.codes) {
      const bytes = Uint8Array.from(atob(stage.data), (character) => character.charCodeAt(0));
      stage.codes = stage.bits === 16 ? new Uint16Array(bytes.buffer) : bytes;
      stage.data = null;
    }
    const size = stage.cells[0] * stage.cells[1], most = 2 ** stage.bits - 3;
    const low = stage.low[head], step = (stage.high[head] - low) / (most - 1);
    return Float32Array.from(stage.codes.subarray(head * size, (head + 1) * size), (code) => {
      if (code === 0) return -Infinity;
      if (code > most) return code === most + 1 ? Infinity : NaN;
      return low + (code - 1) * step;
    });
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

  function read(chosenCell) {
    const stage = current(), [rows, columns] = stage.cells, marker = at(".cell");
    cell = chosenCell && chosenCell[0] < rows && chosenCell[1] < columns ? chosenCell : null;
    marker.hidden = !cell;
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

  // -- what is chosen -----------------------------------------------------------------------------------------------

  function fill(select, names, value) {
    select.replaceChildren(...names.map((name, index) => make("option", { value: index, textContent: name })));
    select.value = String(value);
  }

  function show() {
    const stage = current(), [rows, columns] = stage.cells, { size, axes } = stage;
    chosen.stage = stage.stage;
    chosen.head = Math.min(chosen.head, stage.heads.length - 1);
    fill(control("attention"), attentions.map((attention) => attention.name), chosen.attention);
    fill(control("stage"), stages().map((one) => one.stage), stages().indexOf(stage));
    fill(control("head"), stage.heads, chosen.head);
    heads.replaceChildren(
      ...stage.heads.map((name, head) => {
        const canvas = make("canvas", { className: "thumb", ariaHidden: "true" });
        const label = make("span", { className: "name", textContent: name });
        const button = make("button", { type: "button" }, canvas, label);
        button.setAttribute("aria-pressed", String(head === chosen.head));
        button.tabIndex = head === chosen.head ? 0 : -1;
        button.addEventListener("click", () => go({ head }));
        return button;
      })
    );
    at(".notes").textContent = stage.notes.join(" ");
    at(".signs").replaceChildren(
      ...stage.signs.map(([kind, text]) => make("span", { className: `sign ${kind}`, textContent: text }))
    );
    const places = `${size[0]} places of ${axes[0]} by ${size[1]} of ${axes[1]}`;
    picture.setAttribute("aria-label", `${stage.stage}, ${stage.heads[chosen.head]}: ${places}`);
    at(".rows").textContent = `← ${axes[0]}`;
    at(".columns").textContent = `${axes[1]} →`;
    at(".map").style.setProperty("--ratio", Math.max(columns / rows, 0.25));
    at(".map").style.setProperty("--least", `${Math.min(16 * rows, 160)}px`);
    recolour();
    ticks();
    read(cell);
  }

  function go(change) {
    const focused = heads.contains(document.activeElement);
    Object.assign(chosen, change);
    show();
    if (focused) heads.children[chosen.head].focus();
  }

  function range(from, to) {
    [control("from").value, control("to").value] = [from, to];
    recolour();
  }

  control("attention").addEventListener("change", (event) => go({ attention: Number(event.target.value) }));
  control("head").addEventListener("change", (event) => go({ head: Number(event.target.value) }));
  control("stage").addEventListener("change", (event) => {
    chosen.stage = stages()[Number(event.target.value)].stage;
    range(0, 1000);
    show();
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
    const what = across ? "head" : "attention", count = across ? current().heads.length : attentions.length;
    go({ [what]: (chosen[what] + down + across + count) % count });
  });

  new ResizeObserver(ticks).observe(root);
  show();
})();
