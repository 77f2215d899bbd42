'use strict';
// Names come from strangers: they are put into the page as text, never as HTML.
const DATA = JSON.parse(document.getElementById('data').textContent);
const ROWS_SHOWN = 50;
const CALENDAR_END_MS = 253402300799999;
const DASHES = {solid: '', dash: '7 5', dot: '2 3', dashdot: '7 3 2 3', longdash: '11 4', longdashdot: '11 4 2 4'};
const SYMBOLS = {'circle-open': '○', diamond: '◆', star: '★', 'triangle-down-open': '▽', 'x-thin': '✕'};

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
    scroll.setAttribute('aria-label', grid.title);
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
    // What is not known comes last, whichever way.
    return rows.sort((a, b) => a[at] === b[at] ? 0 : a[at] === null ? 1 : b[at] === null ? -1
      : a[at] < b[at] ? -sign : sign);
  }

  turn(page) {
    const rows = this.found();
    const last = Math.max(0, Math.ceil(rows.length / ROWS_SHOWN) - 1);
    this.page = Math.min(Math.max(page, 0), last);
    const begin = this.page * ROWS_SHOWN, end = Math.min(begin + ROWS_SHOWN, rows.length);
    this.body.replaceChildren(...rows.slice(begin, end).map((row) => this.row(row)));
    this.status.textContent = rows.length ? `${begin + 1} to ${end} of ${rows.length.toLocaleString('en-US')}`
      : 'Nothing fits the filter';
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

function sample(trace) {
  const colour = (trace.line && trace.line.color) || trace.marker.color;
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  const set = (made, values) => Object.entries(values).forEach(([name, value]) => made.setAttribute(name, value));
  set(svg, {width: 30, height: 14, 'aria-hidden': 'true'});
  const add = (tag, values) => {
    const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
    set(made, values);
    svg.append(made);
    return made;
  };
  if (trace.mode === 'markers') {
    add('text', {x: 15, y: 12, fill: colour, 'text-anchor': 'middle', 'font-size': 15})
      .textContent = SYMBOLS[trace.marker.symbol];
  } else if (trace.stackgroup) {
    add('rect', {x: 1, y: 1, width: 28, height: 12, fill: 'none', stroke: colour, 'stroke-width': 1.5});
    add('text', {x: 15, y: 11, fill: colour, 'text-anchor': 'middle', 'font-size': 11, 'font-weight': 700})
      .textContent = (trace.fillpattern.shape || '█').repeat(3);
  } else {
    add('line', {x1: 1, x2: 29, y1: 7, y2: 7, stroke: colour, 'stroke-width': 2.5,
      'stroke-dasharray': DASHES[trace.line.dash]});
  }
  return svg;
}

function legend(plot, traces) {
  return element('ul', {className: 'legend'}, ...traces.map((trace, number) => {
    const button = element('button', {type: 'button', title: 'Hide or show'}, sample(trace),
      element('bdi', {textContent: trace.label || trace.name}));
    button.setAttribute('aria-pressed', 'true');
    button.onclick = () => {
      const shows = button.getAttribute('aria-pressed') !== 'true';
      button.setAttribute('aria-pressed', String(shows));
      Plotly.restyle(plot, {visible: shows}, [number]);
    };
    return element('li', {}, button);
  }));
}

// Fingers scroll the page and keyboards have no drag, so that buttons do what the mouse does.
function zoomTools(plot) {
  const change = (about, zoom, shift) => () => {
    const axis = plot._fullLayout.xaxis;
    const [low, high] = axis.range.map((end) => axis.r2l(end));
    const middle = (low + high) / 2 + shift * (high - low), half = (high - low) / 2 * zoom;
    Plotly.relayout(plot, {'xaxis.range': [axis.l2r(middle - half), axis.l2r(middle + half)]});
  };
  const all = plot.layout.xaxis.range.slice();
  const buttons = [['Closer', .5, 0], ['Wider', 2, 0], ['Earlier', 1, -.5], ['Later', 1, .5]].map(([name, zoom, shift]) =>
    element('button', {type: 'button', textContent: name, onclick: change(name, zoom, shift)}));
  const reset = element('button', {type: 'button', textContent: 'All',
    onclick: () => Plotly.relayout(plot, {'xaxis.range': all.slice(), 'yaxis.autorange': true})});
  return element('div', {className: 'tools'}, ...buttons, reset);
}

function priceTools(plot, figure) {
  const change = (at) => Plotly.update(plot, {x: figure.traces.map((trace) => trace.prices[at])},
    {'xaxis.title.text': figure.prices[at], 'xaxis.type': figure.priceAxes[at], 'xaxis.autorange': true,
      'xaxis.dtick': figure.priceAxes[at] === 'log' ? 'D2' : null, 'xaxis.tickformat': figure.priceAxes[at] === 'log' ? '~s' : ',~r'});
  return element('fieldset', {}, element('legend', {textContent: 'Price: '}), ...figure.prices.map((name, at) =>
    element('label', {}, element('input', {type: 'radio', name: 'price', checked: at === 0, onchange: () => change(at)}),
      ` ${name}`)));
}

function layoutOf(figure, width) {
  const plain = {gridcolor: '#8a949e44', linecolor: '#8a949e', zerolinecolor: '#8a949e88', automargin: true};
  const axis = (told) => ({...plain, ...told, title: {text: told.title, standoff: 12},
    ...(told.type === 'date' ? {hoverformat: '%Y-%m-%d %H:%M:%S.%L'} : told.type === 'log' ? {tickformat: '~s', dtick: 'D2'} : {tickformat: ',~r'}),
    ...(told.tickvals ? {tickformat: null} : {})});
  // Beside each other, labels of times need so much.
  const ticks = Math.max(2, Math.min(8, Math.floor(width / 90)));
  return {
    xaxis: {...axis(figure.x), nticks: ticks, tickangle: 0}, yaxis: {nticks: 6, ...axis(figure.y), fixedrange: figure.time}, height: figure.height || 340,
    showlegend: false, hovermode: figure.hovermode || (figure.time ? 'x' : 'closest'),
    dragmode: figure.time && !matchMedia('(pointer: coarse)').matches ? 'zoom' : false,
    margin: {l: 8, r: 24, t: 12, b: 8}, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: {family: 'system-ui, sans-serif', size: 13},
    hoverlabel: {bgcolor: '#1b1f24', bordercolor: '#8a949e', font: {color: '#fff'}, namelength: 40},
  };
}

for (const figure of DATA.figures) {
  const plot = document.getElementById(figure.id);
  if (figure.prices) figure.traces.forEach((trace) => { trace.x = trace.prices[0]; });
  Plotly.newPlot(plot, figure.traces, layoutOf(figure, plot.clientWidth), {displayModeBar: false, responsive: true});
  plot.before(legend(plot, figure.traces));
  if (figure.time) plot.before(zoomTools(plot));
  if (figure.prices) plot.before(priceTools(plot, figure));
}
for (const grid of DATA.grids) new Grid(document.getElementById(grid.id), grid);
document.documentElement.dataset.ready = 'true';
