// The server's HTTP, and nothing of the page.
import {getKey} from "./store.js";

// status 0: nothing answered, or the connection was cut
export class ApiError extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    Object.assign(this, {status, retryAfter});
  }
}

async function ask(path, options = {}) {
  const key = getKey();
  const headers = {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
  let response;
  try {
    response = await fetch(path, {...options, headers});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.");
  }
  if (!response.ok) throw new ApiError(await wordsOf(response), response.status, response.headers.get("Retry-After"));
  return response;
}

// The server's own words where it has some
async function wordsOf(response) {
  const text = await response.text().catch(() => "");
  try {
    const {error} = JSON.parse(text);
    return error.message ?? error;
  } catch {
    return text.length && text.length < 300 && !text.startsWith("<") ? text : `The server answered ${response.status} ${response.statusText}`;
  }
}

const json = async path => (await ask(path)).json();
export const models = async () => (await json("v1/models")).data;
export const props = () => json("props");
export const health = () => json("health");

// The chunks of an answer as they come. Ending without [DONE] is a cut connection.
export async function* chat(body, signal) {
  const whole = {...body, stream: true, stream_options: {include_usage: true}};
  const response = await ask("v1/chat/completions", {method: "POST", body: JSON.stringify(whole), signal});
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const cut = new ApiError("The connection was cut before the answer ended.");
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read().catch(error => { throw error.name === "AbortError" ? error : cut; });
    if (done) throw cut;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;   // comments that keep the connection alive, and empty lines
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message ?? String(chunk.error), chunk.error.code ?? 500);
      yield chunk;
    }
  }
}
