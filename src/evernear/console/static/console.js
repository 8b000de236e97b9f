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
    if (sendAll) sendAll.hidden = !answers.querySelector("[data-unknown=yes] .send");
  } catch (error) {
    const text = document.createElement("p");
    text.className = "fault";
    text.textContent = error.message;
    card.querySelector(".result").replaceChildren(text);
  }
  card.removeAttribute("aria-busy");
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
    tryFiles(event.dataTransfer.files);
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
