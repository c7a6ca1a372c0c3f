// Requests of the page to this port. The token is kept in this tab's session storage only, and sent as a header.

const KEY = "kvstore-token";

export const token = () => sessionStorage.getItem(KEY) ?? "";
export const keepToken = (text) => sessionStorage.setItem(KEY, text);
export const forgetToken = () => sessionStorage.removeItem(KEY);

export class Problem extends Error {
  constructor(status, detail, field) {
    super(detail);
    this.status = status; // 0: no answer
    this.field = field; // the wrong field, like "body.maximum_bytes"
  }
}

async function send(path, { method = "GET", query = {}, body, signal, headers = {} } = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const address = given.length ? `${path}?${new URLSearchParams(given)}` : path;
  const sent = { ...headers };
  if (token()) sent.Authorization = `Bearer ${token()}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(address, { method, headers: sent, body: body && JSON.stringify(body), signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "the service does not answer: is it running?");
  }
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({ detail: answer.statusText }));
  throw new Problem(answer.status, problem.detail, problem.field);
}

export async function ask(path, options) {
  const answer = await send(path, options);
  return answer.status === 204 ? null : answer.json();
}

// Events as they happen, until the signal. When a response ends, the next one continues after the last event.
export async function follow(last, onEvent, onState, signal) {
  let wait = 1000;
  while (!signal.aborted) {
    try {
      const answer = await send("/v1/events", { signal, headers: last ? { "Last-Event-ID": last } : {} });
      onState(true);
      wait = 1000;
      for await (const message of messages(answer.body)) {
        const event = JSON.parse(message);
        last = event.id;
        onEvent(event);
      }
    } catch (error) {
      if (signal.aborted) return;
      onState(false, error);
      if (error.status === 401) return;
    }
    await new Promise((done) => { setTimeout(done, wait); signal.addEventListener("abort", done, { once: true }); });
    wait = Math.min(2 * wait, 15000);
  }
}

async function* messages(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}
