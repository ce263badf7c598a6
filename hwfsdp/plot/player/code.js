"use strict";
// The event under the cursor in words, and the line that issued it, in its function, with what the function promises. If no event of
// the logs has code, the pane is "Event".

class Code {
  constructor(state, functions) {
    Object.assign(this, { state, functions });
    this.body = document.querySelector("#code .body");
    this.now = document.getElementById("now"); // on a narrow screen the event is explained here, beside the buttons
    this.shown = undefined; // nothing yet, not even that there is no event
    this.chosen = 0; // which of the event's places: 0 is the line that issued it
    this.isBare = Object.keys(functions).length === 0;
    document.getElementById("code").classList.toggle("bare", this.isBare);
    if (this.isBare) document.getElementById("code-title").textContent = "Event";
  }

  draw() {
    const { event } = this.state;
    if (event === this.shown) return;
    this.shown = event;
    this.chosen = 0;
    this.tellNow(event);
    this.fill();
  }

  fill() {
    const event = this.shown;
    if (!event) {
      this.body.replaceChildren(make("p", { class: "soft" }, "Nothing has begun yet. Press → for the first event."));
      return;
    }
    const places = event.log.places[event.code] ?? [];
    const facts = [...factsOf(event), ...orderOf(event)].map((fact) => make("div", { class: "soft" }, whole(fact)));
    const said = [make("strong", {}, nameOf(event)), ...facts];
    for (const reason of reasonsOf(event)) said.push(make("div", { class: "reason" }, whole(reason)));
    this.body.replaceChildren(make("div", { class: "event" }, ...said));
    if (!places.length) {
      if (!this.isBare) this.body.append(make("p", { class: "soft" }, "The log does not say which line issued this event."));
      return;
    }
    this.body.append(this.trail(places), ...this.functionAt(places[this.chosen]));
    this.body.scrollTop = 0;
    const mark = this.body.querySelector("mark"), list = this.body.querySelector("ol");
    if (mark && list) list.scrollTop = mark.offsetTop - list.clientHeight / 2;
  }

  /** The event in running text: first why, then the facts. */
  tellNow(event) {
    if (!event) return this.now.replaceChildren("Nothing has begun yet.");
    const facts = make("span", { class: "soft" }, whole([...factsOf(event), ...orderOf(event)].join("; ")));
    this.now.replaceChildren(make("strong", {}, nameOf(event)), whole(` ${[...reasonsOf(event), ""].join(" ")}`), facts);
    this.now.scrollTop = 0;
  }

  /** Who called whom, from the outside in; each leads to its function. */
  trail(places) {
    const names = places.map(([name], i) => {
      const { function: whole } = this.functions[name], button = make("button", {
        class: "place", "aria-pressed": String(i === this.chosen), title: whole,
        onclick: () => { this.chosen = i; this.fill(); },
      }, whole.split(".").filter((part) => part !== "<locals>").pop());
      return button;
    });
    const [name, line] = places[this.chosen], where = make("span", {}, ` ${this.functions[name].file}:${line}`);
    return make("div", { class: "trail", role: "group", "aria-label": "Calls, from the outside in" },
      ...names.reverse().flatMap((button, i) => (i ? [" › ", button] : [button])), where);
  }

  functionAt([name, line]) {
    const found = this.functions[name];
    if (!found.lines) return [make("p", { class: "soft" }, `${found.function}. Its text is not shown: ${found.missing}.`)];
    const [first, last] = found.docstring.length ? found.docstring : [0, -1];
    const indent = Math.min(...found.lines.filter((text) => text.trim()).map((text) => text.search(/\S/)));
    const rows = found.lines.map((text, i) => {
      const number = found.first + i, isHere = number === line, isSaid = number >= first && number <= last;
      const style = `padding-left: ${Math.max(0, text.search(/\S|$/) - indent) + 4}ch`; // what wraps stands four columns further in
      const content = make(isHere ? "mark" : "span", { style, ...(isSaid ? { class: "said" } : {}) }, ...breakable(text.trim() || " "));
      return make("li", { value: number, ...(isHere ? { "aria-current": "true" } : {}) }, content);
    });
    const promise = found.promise ? make("p", { class: "promise" }, ...prose(found.promise)) : null;
    return [...(promise ? [promise] : []), make("ol", { tabindex: "0", "aria-label": `Source of ${found.function}` }, ...rows)];
  }
}
