"use strict";
// Numbers as people read them, and elements made in one line.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function threeDigits(value) {
  return value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0);
}

/** Bytes: "512 B", "1.50 KiB", "20.0 MiB". With `like`, in the unit of that many bytes: terms of one sum have one unit. */
function bytesText(bytes, like = bytes) {
  let power = 0;
  while (like >= 1024 ** (power + 1) && power < UNITS.length - 1) power += 1;
  const value = bytes / 1024 ** power, isSmall = value < 0.1;
  if (power === 0 || bytes === 0) return `${bytes} ${UNITS[power]}`;
  return `${isSmall ? (value < 0.001 ? "<0.001" : value.toFixed(3)) : threeDigits(value)} ${UNITS[power]}`;
}

/** Microseconds as milliseconds: "0.25 ms", "12.5 ms"; what is shorter than 10 µs as µs. */
function msText(us) {
  const size = Math.abs(us);
  return size > 0 && size < 10 ? `${us.toFixed(1)} µs` : `${us < 0 ? "−" : ""}${threeDigits(size / 1e3)} ms`;
}

/** The least and the most of some times: "1.52 to 1.77 ms"; "" for fewer than two. */
function rangeText(times) {
  if (times.length < 2) return "";
  const [least, most] = [Math.min(...times), Math.max(...times)].map(msText), unit = most.slice(most.lastIndexOf(" "));
  return `${least.endsWith(unit) ? least.slice(0, -unit.length) : least} to ${most}`;
}

function countText(count) {
  return Math.round(count).toLocaleString("en-US");
}

function percentText(share) {
  return `${Math.round(100 * share)}%`;
}

/** "1 rank", "2 ranks". */
function numberOf(count, what) {
  return `${countText(count)} ${what}${count === 1 ? "" : "s"}`;
}

/** The text, in which no line ends between a number and its unit. */
function whole(text) {
  return text.replace(/(\d) (?=(?:µs|ms|[KMGT]i?B|B)\b)/g, "$1\u00a0");
}

/** An element with attributes and children. Texts become text: nothing in a log is ever read as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A sentence as elements: what stands between backticks is code. */
function prose(text) {
  return text.split("`").map((part, i, parts) => (i % 2 && i < parts.length - 1 ? make("code", {}, part) : i % 2 ? `\`${part}` : part));
}

/** Text whose long pieces, which have no space, may wrap at an operator or a dot; no word is cut. */
function breakable(text) {
  const parts = text.replace(/\S{20,}/g, (long) => long.replace(/([([{,=|])(?=[\w"'*])|(?=\.[A-Za-z_])/g, "$1\n")).split("\n");
  return parts.flatMap((part, i) => (i ? [make("wbr"), part] : [part]));
}

/** The last parts of a dotted name that fit: "layers.0.block", "0.block", "block"; "" if none does. */
function fittingName(context, name, room) {
  const parts = name.split(".");
  for (let from = 0; from < parts.length; from += 1) {
    const tail = parts.slice(from).join(".");
    if (context.measureText(tail).width <= room) return tail;
  }
  return "";
}

/** The place of the first item of an ascending list for which `isBeyond` holds; its length if there is none. */
function firstPlace(list, isBeyond) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isBeyond(list[middle])) high = middle;
    else low = middle + 1;
  }
  return low;
}
