// Calls of the console's own port.  The secret comes in the address that the command printed; it
// stays in this tab, and goes out in a header only.

const HEADER = "X-Dlog-Console";
const KEY = "dlog-console";

export function takeSecret() {
  const found = /^#secret=([\w-]+)$/.exec(location.hash);
  if (found) {
    sessionStorage.setItem(KEY, found[1]);
    history.replaceState(null, "", "/#/");
  }
}

function headers() {
  return { [HEADER]: sessionStorage.getItem(KEY) ?? "" };
}

async function checked(response) {
  if (response.ok) return response;
  let text = `${response.status} ${response.statusText}`;
  try {
    text = (await response.json()).error;
  } catch {
    // The status says what there is to say.
  }
  throw new Error(text);
}

export async function get(path, query = {}) {
  const wanted = `/api/${path}?${new URLSearchParams(query)}`;
  return (await checked(await fetch(wanted, { headers: headers() }))).json();
}

export async function post(path, body) {
  const response = await fetch(`/api/${path}`, {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  return (await checked(response)).json();
}

// Yields [name, value] of each server-sent event.  EventSource sends no headers of its own.
export async function* events(path, query, signal) {
  const wanted = `/api/${path}?${new URLSearchParams(query)}`;
  const response = await checked(await fetch(wanted, { headers: headers(), signal }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const found = /^event: (\w+)\ndata: (.*)$/.exec(block);
      if (found) yield [found[1], JSON.parse(found[2])];
    }
  }
}
