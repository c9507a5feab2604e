// Conversations are kept in this browser's IndexedDB, and nowhere else. Where a browser has none (some have none in
// private windows), they last as long as the page.

const NAME = "forerun";
const HEADS = "heads"; // what the list shows: id, title, updatedAt
const BODIES = "bodies"; // whole conversations

const memory = new Map();
let opening = null;

/** Returns the database, or null where there is none. */
function open() {
  opening ??= new Promise((resolve) => {
    try {
      const asked = indexedDB.open(NAME, 1);
      asked.onupgradeneeded = () => {
        asked.result.createObjectStore(HEADS, { keyPath: "id" });
        asked.result.createObjectStore(BODIES, { keyPath: "id" });
      };
      asked.onsuccess = () => resolve(asked.result);
      asked.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opening;
}

const result = (asked) =>
  new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });

const head = ({ id, title, updatedAt }) => ({ id, title, updatedAt });
const newestFirst = (heads) => heads.sort((one, other) => other.updatedAt - one.updatedAt);

/** Returns whether conversations outlast the page. */
export async function isLasting() {
  return (await open()) !== null;
}

/** Returns the heads of all conversations, the newest first. */
export async function list() {
  const database = await open();
  if (!database) return newestFirst([...memory.values()].map(head));
  return newestFirst(await result(database.transaction(HEADS).objectStore(HEADS).getAll()));
}

/** Returns a whole conversation, or undefined. */
export async function load(id) {
  const database = await open();
  if (!database) return memory.get(id);
  return result(database.transaction(BODIES).objectStore(BODIES).get(id));
}

/** Keeps a conversation as it is now. Throws if the browser has no room for it. */
export async function save(conversation) {
  const database = await open();
  if (!database) return void memory.set(conversation.id, conversation);
  await change(database, (heads, bodies) => {
    heads.put(head(conversation));
    bodies.put(conversation);
  });
}

/** Removes a conversation. */
export async function remove(id) {
  memory.delete(id);
  const database = await open();
  if (!database) return;
  await change(database, (heads, bodies) => {
    heads.delete(id);
    bodies.delete(id);
  });
}

/** Writes to both stores, or to neither. */
function change(database, write) {
  return new Promise((resolve, reject) => {
    const transaction = database.transaction([HEADS, BODIES], "readwrite");
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
    write(transaction.objectStore(HEADS), transaction.objectStore(BODIES));
  });
}
