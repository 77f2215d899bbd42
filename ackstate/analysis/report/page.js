'use strict';
// Names come from strangers: they are put into the page as text, never as HTML.
const DATA = JSON.parse(document.getElementById('data').textContent);
const ROWS_SHOWN = 50;
const CALENDAR_END_MS = 253402300799999;

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function shown(value, kind) {
  if (value === null) return '-';
  if (kind === 'text') return value;
  if (kind === 'time') {
    return value >= 0 && value <= CALENDAR_END_MS
      ? new Date(value).toISOString().replace('T', ' ').replace('Z', '') : `${value} ms`;
  }
  return value.toLocaleString('en-US', {maximumFractionDigits: Math.abs(value) < 10 ? 3 : 1});
}

// A topic's long name breaks after a slash.
function breakable(text) {
  return text.split(/(?<=\/)/).flatMap((part, at) => at ? [element('wbr'), part] : [part]);
}

// A table that sorts and filters all of its rows and shows a page of them.
class Grid {
  constructor(place, grid) {
    this.grid = grid;
    this.sorted = grid.sort;
    this.descending = grid.descending;
    this.page = 0;
    this.filter = element('input', {type: 'search', autocomplete: 'off', oninput: () => this.turn(0)});
    this.view = element('select', {onchange: () => this.turn(0)},
      ...grid.views.map((view, number) => element('option', {value: number, textContent: view.label})));
    this.sortBy = element('select', {onchange: () => this.sort(Number(this.sortBy.value))},
      ...grid.columns.map((column, number) => element('option', {value: number, textContent: column.label})));
    this.direction = element('button', {type: 'button', onclick: () => this.sort(this.sorted)});
    this.status = element('span', {className: 'status'});
    this.status.setAttribute('role', 'status');
    this.back = element('button', {type: 'button', textContent: 'Back', onclick: () => this.turn(this.page - 1)});
    this.on = element('button', {type: 'button', textContent: 'Next', onclick: () => this.turn(this.page + 1)});
    this.heads = grid.columns.map((column, number) => this.head(column, number));
    this.body = element('tbody');
    const scroll = element('div', {className: 'scroll wide', tabIndex: 0},
      element('table', {}, element('thead', {}, element('tr', {}, ...this.heads)), this.body));
    scroll.setAttribute('role', 'region');
    scroll.setAttribute('aria-label', `Table: ${grid.title}`);
    place.append(
      element('div', {className: 'tools'},
        ...(grid.views.length > 1 ? [element('label', {}, 'Show', this.view)] : []),
        element('label', {}, 'Filter', this.filter),
        element('div', {className: 'tools sort-by'}, element('label', {}, 'Sort by', this.sortBy), this.direction)),
      scroll, element('div', {className: 'tools pages'}, this.back, this.on, this.status));
    this.turn(0);
  }

  head(column, number) {
    const button = element('button', {type: 'button', textContent: column.label, onclick: () => this.sort(number)});
    const head = element('th', {scope: 'col', className: column.kind === 'text' ? 'text' : ''}, button);
    return head;
  }

  sort(number) {
    this.descending = number === this.sorted ? !this.descending : this.grid.columns[number].kind !== 'text';
    this.sorted = number;
    this.turn(0);
  }

  found() {
    const words = this.filter.value.toLocaleLowerCase().split(/\s+/).filter(Boolean);
    const texts = this.grid.columns.flatMap((column, at) => column.kind === 'text' ? [at] : []);
    const rows = this.grid.views[this.view.value || 0].rows.filter((row) => {
      const text = texts.map((at) => row[at]).join('\n').toLocaleLowerCase();
      return words.every((word) => text.includes(word));
    });
    const at = this.sorted, sign = this.descending ? -1 : 1;
    // Unknown values come last, whichever way.
    return rows.sort((a, b) => a[at] === b[at] ? 0 : a[at] === null ? 1 : b[at] === null ? -1
      : a[at] < b[at] ? -sign : sign);
  }

  turn(page) {
    const rows = this.found();
    const last = Math.max(0, Math.ceil(rows.length / ROWS_SHOWN) - 1);
    this.page = Math.min(Math.max(page, 0), last);
    const begin = this.page * ROWS_SHOWN, end = Math.min(begin + ROWS_SHOWN, rows.length);
    this.body.replaceChildren(...rows.slice(begin, end).map((row) => this.row(row)));
    const omitted = this.grid.views[this.view.value || 0].omitted;
    this.status.textContent = (rows.length ? `${begin + 1} to ${end} of ${rows.length.toLocaleString('en-US')}`
      : 'Nothing fits the filter') + (omitted ? `; ${omitted.toLocaleString('en-US')} more, with less redelivery, are in --format csv` : '');
    this.back.disabled = this.page === 0;
    this.on.disabled = this.page === last;
    this.heads.forEach((head, number) => {
      if (number === this.sorted) head.setAttribute('aria-sort', this.descending ? 'descending' : 'ascending');
      else head.removeAttribute('aria-sort');
    });
    this.sortBy.value = this.sorted;
    this.direction.textContent = this.descending ? '▼ falling' : '▲ rising';
  }

  row(values) {
    const picked = this.grid.picked !== null && values[0] === this.grid.picked;
    return element('tr', {className: picked ? 'picked' : ''}, ...this.grid.columns.map((column, at) => {
      const cell = element('td', {className: column.kind === 'text' ? 'text' : ''},
        element('bdi', {}, ...breakable(shown(values[at], column.kind))));
      cell.dataset.column = column.label;
      return cell;
    }));
  }
}

for (const grid of DATA.grids) new Grid(document.getElementById(grid.id), grid);
document.documentElement.dataset.ready = 'true';
