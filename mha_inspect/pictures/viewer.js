"use strict";
(() => {
  const root = document.querySelector(".mha-viewer");
  const held = JSON.parse(document.getElementById("mha-viewer-data").textContent);
  const at = (selector) => root.querySelector(selector);
  const selects = { attention: at("[name=attention]"), stage: at("[name=stage]"), head: at("[name=head]") };
  const sliders = { from: at("[name=from]"), to: at("[name=to]") };
  const picture = at(".picture"), read = at(".read"), heads = at(".heads");
  const EDGE = 64; // cells along a side of a thumbnail
  const chosen = { attention: held.first.attention, stage: held.first.stage, head: held.first.head };
  let cell = null, plot = null;

  const tables = held.colours.map((hex) => Array.from({ length: 256 }, (_, i) => parseInt(hex.substr(6 * i, 6), 16)));

  // -- the elements: code 0 is masked, the two highest are inf and NaN, and between them the numbers of a head ------

  function stage() {
    const stages = held.attentions[chosen.attention].stages;
    return stages.find((one) => one.stage === chosen.stage) || stages[0];
  }

  function codes(one, head) {
    if (!one.codes) {
      const text = atob(one.data), bytes = new Uint8Array(text.length);
      for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
      one.codes = one.bits === 16 ? new Uint16Array(bytes.buffer) : bytes;
      one.data = null;
    }
    const size = one.cells[0] * one.cells[1];
    return one.codes.subarray(head * size, (head + 1) * size);
  }

  function number(one, head, code) {
    const most = 2 ** one.bits - 3; // code of the largest number
    if (code === 0) return -Infinity;
    if (code > most) return code === most + 1 ? Infinity : NaN;
    return one.low[head] + ((code - 1) / (most - 1)) * (one.high[head] - one.low[head]);
  }

  function written(value) {
    if (Number.isNaN(value)) return "NaN";
    if (value === -Infinity) return "masked";
    if (!Number.isFinite(value)) return "inf";
    const small = value !== 0 && Math.abs(value) < 1e-4;
    return small ? value.toExponential(3) : String(Number(value.toPrecision(4)));
  }

  function thumbnail(one, head) {
    one.thumbnails = one.thumbnails || [];
    if (!one.thumbnails[head]) {
      const [rows, columns] = one.cells, all = codes(one, head);
      const high = Math.ceil(rows / EDGE), wide = Math.ceil(columns / EDGE);
      const size = [Math.ceil(rows / high), Math.ceil(columns / wide)];
      const largest = new (one.bits === 16 ? Uint16Array : Uint8Array)(size[0] * size[1]);
      for (let row = 0, place = 0; row < rows; row++) {
        const start = Math.floor(row / high) * size[1];
        for (let column = 0; column < columns; column++, place++) {
          const to = start + Math.floor(column / wide);
          if (all[place] > largest[to]) largest[to] = all[place];
        }
      }
      one.thumbnails[head] = { codes: largest, size };
    }
    return one.thumbnails[head];
  }

  // -- colours ----------------------------------------------------------------------------------------------------

  function ends(one) {
    const [low, high] = one.scale;
    return [low + ((high - low) * sliders.from.value) / 1000, low + ((high - low) * sliders.to.value) / 1000];
  }

  function image(one, head, all, rows, columns) {
    const pixels = new ImageData(columns, rows), out = new Uint32Array(pixels.data.buffer);
    const table = tables[one.signed ? 1 : 0].map((c) => 0xff000000 | ((c & 255) << 16) | (c & 0xff00) | (c >> 16));
    const [low, high] = ends(one), most = 2 ** one.bits - 3;
    const start = one.low[head], step = (one.high[head] - start) / (most - 1), whole = high - low || 1;
    for (let i = 0; i < all.length; i++) {
      const code = all[i];
      if (code === 0) continue; // masked: the hatched ground is seen
      if (code > most) {
        out[i] = code === most + 1 ? 0xffffffff : 0xffff00ff;
        continue;
      }
      const place = Math.floor(((start + (code - 1) * step - low) / whole) * 256);
      out[i] = table[place < 0 ? 0 : place > 255 ? 255 : place];
    }
    const canvas = document.createElement("canvas");
    canvas.width = columns;
    canvas.height = rows;
    canvas.getContext("2d").putImageData(pixels, 0, 0);
    return canvas;
  }

  // -- the picture ------------------------------------------------------------------------------------------------

  function labels(one, side) {
    const names = held.tokens[one.axes[side]] || [];
    return names.length === one.size[side] ? names : null;
  }

  function place(one, side, index) {
    const size = one.block[side], first = index * size, last = Math.min(first + size, one.size[side]) - 1;
    const names = labels(one, side), name = names ? ` “${names[first]}”${last > first ? "…" : ""}` : "";
    return `${one.axes[side]} ${first}${last > first ? "–" + last : ""}${name}`;
  }

  function draw() {
    const one = stage(), [rows, columns] = one.cells;
    const style = getComputedStyle(root), ratio = window.devicePixelRatio || 1;
    const ink = style.getPropertyValue("--ink"), font = "12px " + style.fontFamily;
    const context = picture.getContext("2d");
    context.font = font;
    const shorten = (text) => (text.length > 14 ? text.slice(0, 13) + "…" : text);
    const down = labels(one, 0), across = labels(one, 1);
    const widest = (names, numbered) =>
      Math.ceil(Math.max(...(names ? names.map(shorten) : [String(numbered)]).map((t) => context.measureText(t).width)));
    const left = widest(down, one.size[0]) + 26, below = (across ? widest(across) : 14) + 28, top = 4, right = 8;
    const full = picture.clientWidth || 600;
    let width = Math.max(full - left - right, 40), height = (width * rows) / columns;
    const tallest = Math.max(Math.min(window.innerHeight * 0.8, 640), 240);
    if (height > tallest) {
      height = tallest;
      if (rows <= 4 * columns) width = (height * columns) / rows;
    }
    height = Math.max(height, Math.min(16 * rows, 160));
    picture.style.height = top + height + below + "px";
    picture.width = full * ratio;
    picture.height = (top + height + below) * ratio;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, full, top + height + below);
    plot = { left, top, width, height };

    context.save(); // hatched where nothing is drawn over it: masked
    context.beginPath();
    context.rect(left, top, width, height);
    context.clip();
    context.strokeStyle = style.getPropertyValue("--hatch");
    context.lineWidth = 1;
    context.beginPath();
    for (let x = -height; x < width; x += 7) {
      context.moveTo(left + x, top + height);
      context.lineTo(left + x + height, top);
    }
    context.stroke();
    context.imageSmoothingEnabled = false;
    context.drawImage(image(one, chosen.head, codes(one, chosen.head), rows, columns), left, top, width, height);
    cross(one, context, width / columns, height / rows);
    context.restore();
    context.strokeStyle = style.getPropertyValue("--line");
    context.strokeRect(left - 0.5, top - 0.5, width + 1, height + 1);

    context.font = font;
    context.fillStyle = ink;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const [index, text] of ticks(one, 0, height, down, 15))
      context.fillText(shorten(text), left - 5, top + ((index + 0.5) * height) / rows);
    const room = across ? 15 : context.measureText(String(one.size[1])).width + 10;
    for (const [index, text] of ticks(one, 1, width, across, room)) {
      const x = left + ((index + 0.5) * width) / columns;
      if (across) {
        context.save();
        context.translate(x, top + height + 5);
        context.rotate(-Math.PI / 2);
        context.fillText(shorten(text), 0, 0);
        context.restore();
      } else {
        context.textAlign = "center";
        context.fillText(text, x, top + height + 11);
      }
    }
    context.textAlign = "center";
    context.fillText(`${one.axes[1]} →`, left + width / 2, top + height + below - 8);
    context.save();
    context.translate(8, top + height / 2);
    context.rotate(-Math.PI / 2);
    context.fillText(`← ${one.axes[0]}`, 0, 0);
    context.restore();
    if (cell) {
      const w = width / columns, h = height / rows, x = left + cell[1] * w, y = top + cell[0] * h;
      context.lineWidth = 3;
      context.strokeStyle = "#000";
      context.strokeRect(x - 1, y - 1, w + 2, h + 2);
      context.lineWidth = 1;
      context.strokeStyle = "#fff";
      context.strokeRect(x - 1, y - 1, w + 2, h + 2);
    }
  }

  // NaN is told apart by more than its colour, where there is room.
  function cross(one, context, width, height) {
    const nan = 2 ** one.bits - 1, all = codes(one, chosen.head), columns = one.cells[1];
    if (Math.min(width, height) < 6 || !one.signs.some(([kind]) => kind === "nan")) return;
    context.strokeStyle = "#000";
    context.beginPath();
    for (let i = 0; i < all.length; i++) {
      if (all[i] !== nan) continue;
      const x = plot.left + ((i % columns) + 0.25) * width, y = plot.top + (Math.floor(i / columns) + 0.25) * height;
      context.moveTo(x, y);
      context.lineTo(x + width / 2, y + height / 2);
      context.moveTo(x, y + height / 2);
      context.lineTo(x + width / 2, y);
    }
    context.stroke();
  }

  function ticks(one, side, length, names, room) {
    const count = one.cells[side], most = Math.max(Math.floor(length / room), 1);
    const apart = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128].find((n) => count / n <= most) || count;
    const found = [];
    for (let index = 0; index < count; index += apart) {
      const first = index * one.block[side];
      found.push([index, names ? names[first] : String(first)]);
    }
    return found;
  }

  function tell() {
    const one = stage();
    picture.setAttribute(
      "aria-label",
      `${one.stage}, ${one.heads[chosen.head]}: ${one.size[0]} places of ${one.axes[0]} by ${one.size[1]} of ${one.axes[1]}`
    );
    if (!cell) {
      read.textContent = `${one.stage}, ${one.heads[chosen.head]}`;
      return;
    }
    const value = number(one, chosen.head, codes(one, chosen.head)[cell[0] * one.cells[1] + cell[1]]);
    const largest = one.block[0] * one.block[1] > 1 && Number.isFinite(value) ? "at most " : "";
    read.textContent = `${place(one, 0, cell[0])}, ${place(one, 1, cell[1])}: ${largest}${written(value)}`;
  }

  // -- what is around it ------------------------------------------------------------------------------------------

  function fill(select, names, value) {
    select.replaceChildren(
      ...names.map((name, index) => {
        const option = document.createElement("option");
        option.value = String(index);
        option.textContent = name;
        return option;
      })
    );
    select.value = String(value);
  }

  function colours() {
    const one = stage(), [low, high] = ends(one);
    at(".low").textContent = written(low);
    at(".high").textContent = written(high);
    sliders.from.setAttribute("aria-valuetext", written(low));
    sliders.to.setAttribute("aria-valuetext", written(high));
    const bar = at(".bar").getContext("2d"), pixels = bar.createImageData(256, 1);
    tables[one.signed ? 1 : 0].forEach((c, i) => pixels.data.set([c >> 16, (c >> 8) & 255, c & 255, 255], 4 * i));
    bar.putImageData(pixels, 0, 0);
    [...heads.querySelectorAll("canvas")].forEach((canvas, head) => {
      const small = thumbnail(one, head);
      canvas.width = small.size[1];
      canvas.height = small.size[0];
      canvas.getContext("2d").drawImage(image(one, head, small.codes, ...small.size), 0, 0);
    });
    draw();
  }

  function show() {
    const attention = held.attentions[chosen.attention], one = stage();
    chosen.stage = one.stage;
    chosen.head = Math.min(chosen.head, one.heads.length - 1);
    if (cell && (cell[0] >= one.cells[0] || cell[1] >= one.cells[1])) cell = null;
    fill(selects.attention, held.attentions.map((a) => a.name), chosen.attention);
    fill(selects.stage, attention.stages.map((s) => s.stage), attention.stages.indexOf(one));
    fill(selects.head, one.heads, chosen.head);
    const buttons = [...heads.children];
    if (buttons.length !== one.heads.length || buttons.some((b, i) => b.dataset.name !== one.heads[i]))
      heads.replaceChildren(
        ...one.heads.map((name, head) => {
          const button = document.createElement("button"), canvas = document.createElement("canvas");
          const label = document.createElement("span");
          button.type = "button";
          button.dataset.name = name;
          canvas.className = "thumb";
          canvas.setAttribute("aria-hidden", "true");
          label.className = "name";
          label.textContent = name;
          button.append(canvas, label);
          button.addEventListener("click", () => go({ head }));
          return button;
        })
      );
    [...heads.children].forEach((button, head) => {
      button.setAttribute("aria-pressed", String(head === chosen.head));
      button.tabIndex = head === chosen.head ? 0 : -1;
    });
    at(".notes").textContent = one.notes.join(" ");
    at(".signs").replaceChildren(
      ...one.signs.map(([kind, text]) => {
        const sign = document.createElement("span");
        sign.className = `sign ${kind}`;
        sign.textContent = text;
        return sign;
      })
    );
    colours();
    tell();
  }

  function go(change) {
    const focused = heads.contains(document.activeElement);
    Object.assign(chosen, change);
    show();
    if (focused) heads.children[chosen.head].focus();
  }

  function step(what, by) {
    const count = what === "head" ? stage().heads.length : held.attentions.length;
    go({ [what]: (chosen[what] + by + count) % count });
  }

  selects.attention.addEventListener("change", () => go({ attention: Number(selects.attention.value) }));
  selects.head.addEventListener("change", () => go({ head: Number(selects.head.value) }));
  selects.stage.addEventListener("change", () => {
    sliders.from.value = 0;
    sliders.to.value = 1000;
    go({ stage: held.attentions[chosen.attention].stages[Number(selects.stage.value)].stage });
  });
  sliders.from.addEventListener("input", () => {
    sliders.from.value = Math.min(sliders.from.value, sliders.to.value - 1);
    colours();
  });
  sliders.to.addEventListener("input", () => {
    sliders.to.value = Math.max(sliders.to.value, Number(sliders.from.value) + 1);
    colours();
  });
  at("[name=whole]").addEventListener("click", () => {
    sliders.from.value = 0;
    sliders.to.value = 1000;
    colours();
  });

  function point(event) {
    const box = picture.getBoundingClientRect(), [rows, columns] = stage().cells;
    const column = Math.floor(((event.clientX - box.left - plot.left) / plot.width) * columns);
    const row = Math.floor(((event.clientY - box.top - plot.top) / plot.height) * rows);
    const inside = row >= 0 && row < rows && column >= 0 && column < columns;
    if (!inside && !cell) return;
    cell = inside ? [row, column] : null;
    draw();
    tell();
  }
  picture.addEventListener("pointermove", point);
  picture.addEventListener("pointerdown", point);

  const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  picture.addEventListener("keydown", (event) => {
    const move = MOVES[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    const [rows, columns] = stage().cells, from = cell || [-move[0], -move[1]];
    cell = [Math.min(Math.max(from[0] + move[0], 0), rows - 1), Math.min(Math.max(from[1] + move[1], 0), columns - 1)];
    event.preventDefault();
    draw();
    tell();
  });
  heads.addEventListener("keydown", (event) => {
    const move = MOVES[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (move[1]) step("head", move[1]);
    else step("attention", move[0]);
  });

  new ResizeObserver(() => plot && draw()).observe(root);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  show();
})();
