// What the browser keeps: conversations in IndexedDB, settings and the key in localStorage.

const opened = new Promise((resolve, reject) => {
  const request = indexedDB.open("chats", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("chats", {keyPath: "id"});
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

// What is asked of the conversations. A change is handed over at once: one that waited for the answer to its request would be lost with a page that
// is left meanwhile.
async function ask(mode, question) {
  const transaction = (await opened).transaction("chats", mode);
  return new Promise((resolve, reject) => {
    const request = question(transaction.objectStore("chats"));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error ?? request.error);
    transaction.commit();
  });
}

// Other tabs hear of what one of them writes
const others = new BroadcastChannel("chats");
export const onOtherTab = hear => { others.onmessage = event => hear(event.data); };

export const all = () => ask("readonly", chats => chats.getAll());
export const one = id => ask("readonly", chats => chats.get(id));

export async function save(chat) {
  await ask("readwrite", chats => chats.put(chat));
  others.postMessage(chat.id);
}

export async function remove(id) {
  await ask("readwrite", chats => chats.delete(id));
  others.postMessage(id);
}

// Empty sampling fields are the server's to choose
const DEFAULTS = {thinking: true, system: "", tools: "", sampling: {}, model: ""};
export const settings = {...DEFAULTS, ...JSON.parse(localStorage.getItem("settings") ?? "{}")};
export const keepSettings = () => localStorage.setItem("settings", JSON.stringify(settings));

export const getKey = () => localStorage.getItem("key") ?? "";
export const setKey = key => (key ? localStorage.setItem("key", key) : localStorage.removeItem("key"));
