"use strict";
// The live page: it asks the server once a second, and draws what it is told. There is no library.

const at = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(0)} %`;
const inPoints = (share) => (Math.round(100 * share) || 0).toString().replace("-", "−");
const decimals = (value) => (value === null || value === undefined ? "–" : value.toFixed(value < 10 ? 2 : 0));
const SVG = "http://www.w3.org/2000/svg";
const PAUSE = 1000; // milliseconds between an answer and the next question
const WINDOW = 10; // batches of which an accuracy is the mean
let model = null;
let recentDrawn = ""; // the latest images that are on the page
let weatherIsMine = 0; // a moment until which the sliders are not overwritten

async function ask(path, options = {}) {
  const answer = await fetch(path, options);
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error || `The server answered ${answer.status}.`);
  return told;
}

function say(element, content) { // only what has changed, which a screen reader may read aloud
  if (element.textContent !== content) element.textContent = content;
}

function text(parent, tag, content, name = "") {
  const element = document.createElement(tag);
  element.textContent = content;
  if (name) element.className = name;
  parent.append(element);
  return element;
}

function shape(parent, tag, attributes, content = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = content;
  parent.append(element);
  return element;
}

function line(element, values, width, height, low, high) {
  const scale = high > low ? height / (high - low) : 0;
  const step = width / Math.max(1, values.length - 1);
  element.setAttribute("points", values.map((v, i) => `${(i * step).toFixed(1)},${(height - (v - low) * scale).toFixed(1)}`).join(" "));
}

// ---- the demonstration

function smoothed(points, name, batch, changes) {
  let change = 0; // where the weather changed last: a mean over two weathers would show neither
  return points.map((_, i) => {
    if (changes.includes(i)) change = i;
    const some = points.slice(Math.max(change, i - WINDOW + 1), i + 1);
    return some.reduce((sum, point) => sum + point[name], 0) / (some.length * batch);
  });
}

function drawDemo(told) {
  at("demo").hidden = false;
  const names = Object.keys(told.weather);
  for (const name of names) {
    const input = at("weather").elements[name];
    if (Date.now() > weatherIsMine) input.value = told.weather[name];
    input.nextElementSibling.value = input.value;
  }
  const points = told.points;
  if (!points.length) return;
  const whole = Math.max(320, at("curves").clientWidth); // units are pixels, so that the text is legible on a narrow screen
  const tall = whole > 700 ? 320 : 260;
  at("curves").setAttribute("viewBox", `0 0 ${whole} ${tall}`);
  const [left, top, width, height] = [48, 12, whole - 58, tall - 42];
  const grid = at("curves").querySelector(".grid");
  grid.replaceChildren();
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const y = top + height * (1 - share);
    shape(grid, "line", {x1: left, x2: left + width, y1: y, y2: y});
    shape(grid, "text", {x: left - 6, y: y + 4, "text-anchor": "end"}, percent(share));
  }
  const changes = points.flatMap((point, i) => (i && names.some((name) => points[i - 1][name] !== point[name]) ? [i] : []));
  const place = (i) => left + (i * width) / Math.max(1, points.length - 1);
  let free = Infinity; // the place up to which no label is written yet
  for (const i of changes.reverse()) {
    const [point, x] = [points[i], place(i)];
    shape(grid, "line", {x1: x, x2: x, y1: top, y2: top + height, class: "change"});
    const label = names.filter((name) => point[name]).map((name) => `${name} ${point[name]}`).join(", ") || "clear";
    const wide = 7 * label.length; // pixels, about
    const start = Math.min(x + 4, left + width - wide);
    if (start + wide > free) continue; // it would cover the label of a later change
    free = start;
    shape(grid, "text", {x: start, y: top + height + 16}, label);
  }
  const curves = {};
  for (const name of ["source", "adapted"]) curves[name] = smoothed(points, name, told.batch, changes);
  for (const [name, values] of Object.entries(curves)) {
    const drawn = at("curves").querySelector(`.line.${name}`);
    drawn.setAttribute("transform", `translate(${left} ${top})`);
    line(drawn, values, width, height, 0, 1);
  }
  const [source, adapted] = [curves.source.at(-1), curves.adapted.at(-1)];
  at("source-accuracy").textContent = percent(source);
  at("adapted-accuracy").textContent = percent(adapted);
  const gain = Math.round(100 * adapted) - Math.round(100 * source);
  at("gain").textContent = `${gain >= 0 ? "+" : "−"}${Math.abs(gain)}`;
  const sentence = `The source model is right on ${percent(source)} of the latest images, the adapted model on ${percent(adapted)}.`;
  say(at("curves-text"), sentence);
  at("demo-note").textContent = `Mean over the latest ${WINDOW * told.batch} images of the same weather. Batch ${points.at(-1).batch}.`;
}

at("weather").addEventListener("input", (event) => {
  weatherIsMine = Date.now() + 2000;
  event.target.nextElementSibling.value = event.target.value;
});
at("weather").addEventListener("change", (event) => {
  const body = JSON.stringify({[event.target.name]: Number(event.target.value)});
  ask("demo", {method: "POST", headers: {"Content-Type": "application/json"}, body}).then(drawDemo, trouble);
});

at("token-form").addEventListener("submit", (event) => event.preventDefault());

// ---- streams

function card(name) {
  const found = [...at("streams").children].find((each) => each.dataset.stream === name);
  if (found) return found;
  const made = at("card").content.firstElementChild.cloneNode(true);
  made.dataset.stream = name;
  made.setAttribute("aria-label", `Stream ${name}`);
  made.addEventListener("click", (event) => {
    const action = event.target.dataset.action;
    if (!action) return;
    const headers = at("token").value ? {Authorization: `Bearer ${at("token").value}`} : {};
    ask(`streams/${encodeURIComponent(name)}/${action}`, {method: "POST", headers}).then(
      () => { made.querySelector("[role=status]").textContent = `Done: ${action}.`; update(); },
      (error) => { made.querySelector("[role=status]").textContent = error.message; },
    );
  });
  at("streams").append(made);
  return made;
}

const most = (values, least) => Math.max(least, ...values.map(Math.abs));
const TRENDS = { // by name: what it is of in the history, the ends of its axis, and how a value is told
  "mean entropy": ["entropy", (values) => [0, most(values, 0.1)], decimals],
  "estimated accuracy": ["accuracy", () => [0, 1], percent],
  "estimated harm": ["harm", (values) => [-most(values, 0.05), most(values, 0.05)], (value) => `${inPoints(value)} points`],
};

function drawTrends(parent, history) {
  for (const [i, [name, [key, ends, told]]] of Object.entries(TRENDS).entries()) {
    if (!parent.children[i]) {
      const figure = text(parent, "figure", "");
      const drawn = shape(figure, "svg", {viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img"});
      if (name === "estimated harm") shape(drawn, "line", {x1: 0, x2: 100, y1: 20, y2: 20, class: "zero"});
      shape(drawn, "polyline", {class: "line adapted"});
      text(figure, "figcaption", name).setAttribute("aria-hidden", "true");
    }
    const values = history.map((each) => each[key]).filter((value) => value !== null);
    const drawn = parent.children[i].firstElementChild;
    const some = values.length ? `from ${told(values[0])} to ${told(values.at(-1))}` : "not known yet";
    drawn.setAttribute("aria-label", `${name} of the latest ${history.length} batches: ${some}`);
    line(drawn.lastElementChild, values, 100, 40, ...ends(values));
  }
}

function drawStream(stream, admin) {
  const made = card(stream.name);
  const last = stream.history.at(-1) || {};
  const facts = {
    "images": stream.images,
    "learned from": stream.learned,
    "steps": stream.steps,
    "mean entropy": decimals(last.entropy),
    "estimated accuracy": last.accuracy === null || last.accuracy === undefined ? "–" : percent(last.accuracy),
    "estimated harm": last.harm === null || last.harm === undefined ? "–"
      : `${inPoints(last.harm)} points (${inPoints(last.harm_low)}\u00a0to\u00a0${inPoints(last.harm_high)})`,
    "drift": decimals(last.drift),
    "latency": last.milliseconds === undefined ? "–" : `${last.milliseconds.toFixed(0)} ms`,
  };
  const list = made.querySelector("dl");
  if (!list.children.length) for (const name of Object.keys(facts)) { text(list, "dt", name); text(list, "dd", ""); }
  for (const [i, value] of Object.values(facts).entries()) say(list.querySelectorAll("dd")[i], String(value));
  made.classList.toggle("frozen", stream.frozen);
  say(made.querySelector("h3"), stream.name + (stream.frozen ? " (frozen)" : ""));
  drawTrends(made.querySelector(".trends"), stream.history);
  made.querySelector(".buttons").hidden = admin === "closed";
  const freeze = made.querySelector("[data-action=freeze], [data-action=thaw]");
  freeze.dataset.action = stream.frozen ? "thaw" : "freeze";
  freeze.textContent = stream.frozen ? "Thaw" : "Freeze";
  const [events, latest] = [made.querySelector(".events"), stream.events.slice(-3)];
  if (events.textContent === latest.join("")) return;
  events.replaceChildren();
  for (const event of latest) text(events, "li", event);
}

function drawRecent(recent) {
  at("seen").hidden = !recent.length;
  if (JSON.stringify(recent) === recentDrawn) return;
  recentDrawn = JSON.stringify(recent);
  at("recent").replaceChildren();
  for (const each of [...recent].reverse()) {
    const item = document.createElement("li");
    item.classList.toggle("differs", each.source !== each.adapted);
    const picture = document.createElement("img");
    picture.src = each.image;
    picture.alt = `An image of the stream ${each.stream}`;
    item.append(picture);
    const mark = (prediction) => (each.truth === null ? "" : prediction === each.truth ? "\u00a0✓" : "\u00a0✗");
    text(item, "div", each.truth ?? `of ${each.stream}`, "truth");
    text(item, "div", `source: ${each.source}${mark(each.source)}`, "source");
    text(item, "div", `adapted: ${each.adapted}${mark(each.adapted)}`, "adapted");
    at("recent").append(item);
  }
}

function draw(told) {
  model = told.model;
  const count = told.all === 1 ? "1 stream" : `${told.all} streams`;
  const shown = told.all > told.streams.length ? ` (${told.streams.length} in memory)` : "";
  say(at("about"), `${told.model} with ${told.method}: ${count}${shown},`);
  say(at("waiting"), told.waiting === 1 ? "1 image waits" : `${told.waiting} images wait`);
  at("no-streams").hidden = told.streams.length > 0;
  at("token-form").hidden = told.admin !== "token";
  const names = new Set(told.streams.map((stream) => stream.name));
  for (const each of [...at("streams").children]) if (!names.has(each.dataset.stream)) each.remove();
  for (const stream of told.streams) drawStream(stream, told.admin);
  drawRecent(told.recent);
}

function trouble(error) {
  say(at("about"), `There is no answer from the server: ${error.message}`);
}

// ---- an image of one's own

async function classify(file) {
  at("answer").textContent = "…";
  try {
    const told = await ask(`v2/models/${encodeURIComponent(model)}/infer?sequence_id=page`, {
      method: "POST", headers: {"Content-Type": file.type.startsWith("image/") ? file.type : "image/jpeg"}, body: file,
    });
    const logits = told.outputs.find((output) => output.name === "logits").data;
    const most = Math.max(...logits);
    const sure = 1 / logits.reduce((sum, value) => sum + Math.exp(value - most), 0);
    at("answer").textContent = `${told.outputs.find((output) => output.name === "label").data[0]} (${percent(sure)})`;
  } catch (error) {
    at("answer").textContent = error.message;
  }
}

at("file").addEventListener("change", (event) => event.target.files[0] && classify(event.target.files[0]));
for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => event.preventDefault()); // beside the area, too
at("drop").addEventListener("dragover", () => at("drop").classList.add("over"));
at("drop").addEventListener("dragleave", () => at("drop").classList.remove("over"));
at("drop").addEventListener("drop", (event) => {
  at("drop").classList.remove("over");
  if (event.dataTransfer.files[0]) classify(event.dataTransfer.files[0]);
});

async function update() {
  try {
    const told = await ask("streams");
    draw(told);
    if (told.demo) drawDemo(await ask("demo"));
  } catch (error) {
    trouble(error);
  }
}

async function keepUpdating() { // a slow server has one question at a time to answer
  await update();
  setTimeout(keepUpdating, PAUSE);
}
keepUpdating();
