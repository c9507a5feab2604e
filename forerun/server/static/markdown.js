// Answers as they are read. Markdown becomes HTML by marked, code is coloured by highlight.js, and nothing reaches the
// page that DOMPurify has not let through. HTML that a model writes is shown as text.

import { copy, button, element } from "./dom.js";
import hljs from "./vendor/highlight.min.js";
import { Marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";

const MAX_COLOURED = 50_000; // characters of a block of code; a longer one is not coloured
const PLAIN_TAG = /^<\/?(?:br|sub|sup|kbd|b|i|u|s|em|strong|mark)\s*\/?>$/i; // HTML that tables and formulas use
const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "kbd", "li", "mark",
    "ol", "p", "pre", "s", "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "u", "ul",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i, // a path would lead into this server
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) =>
  text.replace(/[&<>"']/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[sign]);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text, block }) => {
      if (PLAIN_TAG.test(text.trim())) return text;
      return block ? `<p>${escaped(text.trimEnd()).replaceAll("\n", "<br>")}</p>` : escaped(text);
    },
    // A picture is a link, because the page asks nothing of other servers.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

/** A text in Markdown that grows. Only blocks that have changed are drawn again. */
export class Markdown {
  constructor(into) {
    this.into = into;
    this.blocks = []; // {raw, box}
  }

  /** Shows the text. With `isWhole`, all blocks are drawn again, because a link's address may come at the end. */
  update(text, isWhole = false) {
    const tokens = marked.lexer(text).filter((token) => token.type !== "space" && token.type !== "def");
    let same = 0;
    while (!isWhole && same < tokens.length && this.blocks[same]?.raw === tokens[same].raw) same += 1;
    for (const { box } of this.blocks.splice(same)) box.remove();
    for (const token of tokens.slice(same)) {
      const box = block(token);
      this.blocks.push({ raw: token.raw, box });
      this.into.append(box);
    }
    orderHeadings(this.into);
  }
}

function block(token) {
  const box = element("div", "block");
  box.append(DOMPurify.sanitize(marked.parser([token]), ALLOWED));
  for (const link of box.querySelectorAll("a[href]")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const pre of box.querySelectorAll("pre")) pre.replaceWith(codeBlock(pre));
  for (const table of box.querySelectorAll("table")) table.replaceWith(scroller(table));
  return box;
}

/** Returns a block of code with its language and a button that copies it. */
function codeBlock(pre) {
  const code = pre.querySelector("code") ?? pre;
  const text = code.textContent;
  const language = code.className.match(/language-(\S+)/)?.[1] ?? "";
  const isKnown = text.length <= MAX_COLOURED && hljs.getLanguage(language);
  if (isKnown) {
    const { value } = hljs.highlight(text, { language, ignoreIllegals: true });
    code.replaceChildren(DOMPurify.sanitize(value, ALLOWED));
  }
  pre.tabIndex = 0; // so that the arrow keys scroll long lines
  pre.setAttribute("role", "group");
  pre.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
  const head = element("div", "code-head");
  head.append(element("span", "", language || "text"), button("Copy", (event) => copy(text, event.currentTarget), "quiet"));
  const box = element("div", "code");
  box.append(head, pre.cloneNode(true));
  return box;
}

function scroller(table) {
  const box = element("div", "table");
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Table");
  box.append(table.cloneNode(true));
  return box;
}

/** Gives headings levels without gaps below the page's own, because screen readers list them as an outline. */
function orderHeadings(into) {
  let last = 1;
  for (const heading of into.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    last = Math.min(Number(heading.tagName[1]) + 1, last + 1);
    heading.setAttribute("aria-level", String(last));
  }
}
