// Features that htmx lacks: file uploads, keyboard shortcuts and error messages. This script has no state.
"use strict";

const csrf = document.body.dataset.csrf;
const notice = document.getElementById("notice");

function say(text) {
  notice.textContent = text;
  notice.hidden = !text;
}

async function post(url, file) {
  const response = await fetch(url, {method: "POST", body: file, headers: {"X-Evernear-CSRF": csrf, "HX-Request": "true"}});
  const text = await response.text();
  if (!response.ok) throw new Error(text);
  return text;
}

document.body.addEventListener("htmx:responseError", (event) => say(event.detail.xhr.responseText));
document.body.addEventListener("htmx:sendError", () => say("The console does not answer; is it still running?"));
document.body.addEventListener("htmx:beforeRequest", (event) => {
  if (event.detail.requestConfig.verb !== "get") say(""); // polling leaves the message of an action
});

// Try: each request contains one file, so that the server's size limit applies to one image. Two requests run at a time.
const answers = document.getElementById("answers");
const sendAll = document.getElementById("send-all");

async function send(card, file) {
  const button = card.querySelector(".send");
  if (!button) return;
  button.disabled = true;
  try {
    button.outerHTML = await post("/try/review", file);
    showTools();
  } catch (error) {
    button.disabled = false;
    say(error.message);
  }
}

async function recognize(file, card) {
  try {
    card.querySelector(".result").innerHTML = await post("/try", file);
    card.querySelector(".send")?.addEventListener("click", () => send(card, file));
    card.file = file;
    showTools();
  } catch (error) {
    const text = document.createElement("p");
    text.className = "fault";
    text.textContent = error.message;
    card.querySelector(".result").replaceChildren(text);
  }
  card.removeAttribute("aria-busy");
}

// What can be done with several answers: name them all at once, put unknown ones first, copy a table.
const nameAll = document.getElementById("name-all");

function answered() {
  return [...answers.children].filter((card) => card.querySelector(".answer"));
}

function showTools() {
  if (sendAll) sendAll.hidden = !answers.querySelector("[data-unknown=yes] .send");
  document.getElementById("tools").hidden = answered().length < 2;
}

async function nameCards(chosen) {
  const cards = answered().reverse();
  for (const card of cards) await send(card, card.file);
  const images = cards.map((card) => card.querySelector(".sent")?.dataset.image).filter(Boolean);
  const form = new URLSearchParams({action: "label", label: nameAll.elements.label.value, ...(chosen ? {class: chosen} : {})});
  for (const image of new Set(images)) form.append("image", image);
  const headers = {"X-Evernear-CSRF": csrf, "HX-Request": "true"};
  const response = await fetch("/review", {method: "POST", body: form, headers});
  const text = await response.text();
  if (!response.ok) return say(text);
  const question = nameAll.querySelector(".question");
  question.innerHTML = response.headers.has("HX-Retarget") ? text : "";
  question.querySelector("button")?.focus();
  const notice = new DOMParser().parseFromString(text, "text/html").querySelector(".notice");
  nameAll.querySelector("[role=status].done").textContent = question.innerHTML ? "" : notice?.textContent ?? "";
}

if (answers) {
  nameAll?.addEventListener("submit", (event) => {
    event.preventDefault();
    say("");
    nameCards(event.submitter?.name === "class" ? event.submitter.value : "");
  });
  document.getElementById("unknown-first").addEventListener("click", () => {
    answers.prepend(...answered().filter((card) => card.querySelector("[data-unknown=yes]")));
  });
  document.getElementById("copy").addEventListener("click", async (event) => {
    const text = (card, selector) => card.querySelector(selector).textContent.trim().replace(/\s+/g, " ");
    const rows = answered().map((card) => [text(card, ".file"), text(card, ".big"), card.querySelector(".answer").dataset.distance]);
    try {
      await navigator.clipboard.writeText([["image", "answer", "distance"], ...rows].map((row) => row.join("\t")).join("\n"));
      event.target.textContent = "Copied";
    } catch {
      say("The browser does not let this page copy; `evernear predict --csv IMAGE...` prints the table.");
    }
  });
}

// The images in dropped folders, at any depth.
async function imagesIn(entries) {
  const found = [];
  for (const entry of entries) {
    if (entry.isFile) {
      const file = await new Promise((done, failed) => entry.file(done, failed));
      if (/\.(png|jpe?g|webp|hei[cf])$/i.test(file.name)) found.push(file);
    } else {
      const reader = entry.createReader();
      for (;;) {
        const some = await new Promise((done, failed) => reader.readEntries(done, failed));
        if (!some.length) break; // a call returns at most 100 entries
        found.push(...(await imagesIn(some)));
      }
    }
  }
  return found;
}

async function tryFiles(files) {
  say("");
  const queue = [...files].map((file) => {
    const card = document.createElement("article");
    card.className = "card result-card";
    card.setAttribute("aria-busy", "true");
    const image = document.createElement("img");
    image.src = URL.createObjectURL(file);
    image.alt = "";
    image.addEventListener("error", () => image.remove());
    const about = document.createElement("div");
    about.className = "about";
    const name = document.createElement("p");
    name.className = "file";
    name.textContent = file.name;
    const result = document.createElement("div");
    result.className = "result";
    result.textContent = "Recognizing ...";
    about.append(name, result);
    card.append(image, about);
    answers.prepend(card);
    return [file, card];
  });
  const work = async () => {
    while (queue.length) await recognize(...queue.shift());
  };
  await Promise.all([work(), work()]);
}

if (answers) {
  const drop = document.getElementById("drop");
  for (const id of ["files", "camera"]) {
    document.getElementById(id).addEventListener("change", (event) => {
      tryFiles(event.target.files);
      event.target.value = "";
    });
  }
  document.addEventListener("paste", (event) => tryFiles(event.clipboardData.files));
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  document.addEventListener("dragleave", () => drop.classList.remove("over"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry?.());
    if (entries.some((entry) => entry?.isDirectory)) imagesIn(entries.filter(Boolean)).then(tryFiles);
    else tryFiles(event.dataTransfer.files);
  });
  sendAll?.addEventListener("click", async () => {
    sendAll.hidden = true;
    for (const card of [...answers.children].reverse()) {
      if (card.querySelector("[data-unknown=yes]")) await send(card, card.file);
    }
  });
}

// Review: selection and keys.
const review = document.getElementById("review");
function count() {
  const selected = [...review.querySelectorAll("#naming [name=image]:checked")];
  const groups = new Set(selected.map((box) => box.closest(".group"))).size;
  const text = document.getElementById("count");
  if (text) text.textContent = groups > 1 ? `${selected.length} of ${groups} groups selected` : `${selected.length} selected`;
}
if (review) {
  let last = null; // the group checkbox that was clicked last; Shift also selects the groups in between
  review.addEventListener("click", (event) => {
    if (!event.target.matches("[data-all]")) return;
    const boxes = [...review.querySelectorAll("[data-all]")];
    const ends = [event.target, event.shiftKey && boxes.includes(last) ? last : event.target].map((box) => boxes.indexOf(box));
    for (const box of boxes.slice(Math.min(...ends), Math.max(...ends) + 1)) {
      box.checked = event.target.checked;
      for (const image of box.closest(".group").querySelectorAll("[name=image]")) image.checked = box.checked;
    }
    last = event.target;
  });
  review.addEventListener("change", count);
  review.addEventListener("htmx:afterSwap", count);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches("input:not([type=checkbox]), select, textarea");
    if (typing) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const groups = [...review.querySelectorAll(".group")];
    const current = groups.indexOf(document.activeElement.closest(".group"));
    const move = {j: 1, k: -1}[event.key];
    if (move) groups[Math.min(Math.max(current + move, 0), groups.length - 1)]?.focus();
    else if (event.key === "x") groups[Math.max(current, 0)]?.querySelector("[data-all]")?.click();
    else if (event.key === "n") review.querySelector("#naming [name=label]")?.focus();
    else if (event.key === "u") review.querySelector(".undo")?.click();
    else return;
    event.preventDefault();
  });
}

// A class: a larger view of an image.
const large = document.getElementById("large");
if (large) {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-large]");
    if (!button) return;
    const name = button.querySelector("bdi").textContent;
    large.querySelector("#large-name").textContent = name;
    large.querySelector("img").src = button.dataset.large;
    large.querySelector("img").alt = name;
    large.showModal();
  });
}
