-- The one script of a fleet: takes what one process declares of some tenants, and answers what each
-- of them may have in flight there. A declaration is absolute and numbered, so it may be repeated,
-- delayed or lost without harm.
--
-- KEYS[1]        when the store began to remember (of one bucket)
-- KEYS[2i]       the leases of tenant i: a hash of one field for each process, and the field `T`
-- KEYS[2i + 1]   the limit of tenant i, if it has one of its own
-- ARGV[1..6]     process, lease ms, learning ms, channel prefix, reserve %, 1 if requests queue
-- ARGV[8i - 1..] of tenant i: number, in use, floor, need, want, limit, name, longest wait ms
--
-- Field of a process: granted, in use, idle, unmet, end, number, waits since, declared.
-- Field `T`, over all processes: granted, in use, idle, unmet, processes, first end, last end.
--
-- Runs on Lua 5.1 and 5.4, where numbers become text in different ways: hence `text`.

-- The reserve of a small limit, and of a larger one, in percent, if ARGV leaves it to the script.
local RESERVE_SMALL, RESERVE, SMALL = 50, 25, 16
-- A demand that has not been declared anew for this long (four polls) is that of a dead process.
local FRESH = 400
-- The most notices of each kind for one statement: notices are hints, a poll is what is relied on.
local NOTICES = 8
-- The largest limit.
local MAX_LIMIT = 1000000

local function text(...)
  local out = {...}
  for i = 1, #out do
    out[i] = string.format('%.0f', out[i])
  end
  return table.concat(out, ' ')
end

local function numbers(value)
  local out = {}
  for number in string.gmatch(value, '%S+') do
    out[#out + 1] = tonumber(number)
  end
  return out
end

local function lease_of(process, value)
  local n = numbers(value)
  return {
    process = process, granted = n[1], in_use = n[2], idle = n[3], unmet = n[4],
    ends = n[5], number = n[6], since = n[7], declared = n[8],
  }
end

local function count(totals, lease, sign)
  totals.granted = totals.granted + sign * lease.granted
  totals.in_use = totals.in_use + sign * lease.in_use
  totals.idle = totals.idle + sign * lease.idle
  totals.unmet = totals.unmet + sign * lease.unmet
  totals.processes = totals.processes + sign
  -- The first end is a lower bound and the last an upper one: a lease that is taken out may have
  -- been either. The next sweep makes them exact.
  if sign > 0 then
    totals.first_end = math.min(totals.first_end, lease.ends)
    totals.last_end = math.max(totals.last_end, lease.ends)
  end
end

-- All leases of a tenant.
local function leases_of(key)
  local fields, leases = redis.call('HGETALL', key), {}
  for i = 1, #fields, 2 do
    if fields[i] ~= 'T' then
      leases[#leases + 1] = lease_of(fields[i], fields[i + 1])
    end
  end
  return leases
end

-- Removes the leases that have ended and counts the others anew, so that no error in the totals
-- lasts longer than a lease.
local function sweep(key, now)
  local totals = {
    granted = 0, in_use = 0, idle = 0, unmet = 0, processes = 0, first_end = math.huge, last_end = 0,
  }
  for _, lease in ipairs(leases_of(key)) do
    if lease.ends <= now then
      redis.call('HDEL', key, lease.process)
    else
      count(totals, lease, 1)
    end
  end
  return totals
end

-- Sends a notice to the first processes of a list.
local function notify(leases, most, notice)
  for i = 1, math.min(#leases, most, NOTICES) do
    redis.call('PUBLISH', ARGV[4] .. ':n:' .. leases[i].process, notice)
  end
end

-- Time is the store's alone: the clocks of the processes need not agree with it, nor with each other.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local me, lease_ms = ARGV[1], tonumber(ARGV[2])
local queues = ARGV[6] == '1'

-- Without an epoch the store has lost its memory, and with one to come its clock was set back: in
-- both cases it may not know all leases. For as long as one of them can last it grants only what is
-- in use, and so learns it.
local epoch = tonumber(redis.call('GET', KEYS[1]) or nil)
if not epoch or epoch > now then
  epoch = now
  redis.call('SET', KEYS[1], text(now))
end
local learning = now - epoch < tonumber(ARGV[3])

-- The answer to one statement: status, grant, limit, flags, spare, in flight, processes.
local function answer(key, limit_key, at)
  local number, in_use, floor = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local need, want = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  local name, since = ARGV[at + 6], now - tonumber(ARGV[at + 7])

  local found = redis.call('HMGET', key, 'T', me)
  local mine = found[2] and lease_of(me, found[2])
  -- A statement that was delayed must not undo a newer one: it would lower a grant that is in use.
  if mine and number <= mine.number then
    return {1, 0, 0, 0, 0, 0, 0}
  end

  local totals
  if found[1] then
    local n = numbers(found[1])
    totals = {
      granted = n[1], in_use = n[2], idle = n[3], unmet = n[4], processes = n[5], first_end = n[6],
      last_end = n[7],
    }
  end
  if not totals or totals.first_end <= now then
    totals = sweep(key, now)
    mine = mine and mine.ends > now and mine
  end
  if mine then
    count(totals, mine, -1)
  end

  local set = string.match(redis.call('GET', limit_key) or '', '^%d+$')
  local limit = math.min(tonumber(set or ARGV[at + 5]), MAX_LIMIT)
  local percent = tonumber(ARGV[5])
  if percent < 0 then
    percent = limit < SMALL and RESERVE_SMALL or RESERVE
  end
  -- At least the last slot: a spare part that took it would make each other demand wait.
  local reserve = math.max(math.ceil(limit * percent / 100), 1)

  -- Those of the others who have had demands since before, oldest first.
  local others
  local unmet_of_others, owed = {}, 0
  if totals.unmet > 0 then
    others = leases_of(key)
    for _, lease in ipairs(others) do
      if lease.process ~= me and lease.unmet > 0 and lease.declared + FRESH >= now then
        unmet_of_others[#unmet_of_others + 1] = lease
        if lease.since < since then
          owed = owed + 1
        end
      end
    end
  end
  local others_wait = #unmet_of_others > 0

  -- What is in use cannot be denied. Beyond that no more is granted than is free, less one for each
  -- process whose requests have waited longer.
  local free = limit - totals.granted
  local grant = math.max(floor, in_use)
  if not learning then
    grant = math.max(grant, math.min(need, free - owed))
    -- More than is needed is granted only beyond the reserve, and if no request waits elsewhere.
    if not others_wait then
      grant = math.max(grant, math.min(want, free - reserve))
    end
  end

  -- What the others may hold without using it.
  local spare = totals.idle
  local unmet = math.max(need - grant, 0)
  -- A request that is rejected at once demands nothing any more.
  if not queues and spare == 0 then
    unmet = 0
  end

  local left = free - grant
  local tight = left < reserve
  local overcommitted = left < 0
  -- A process that has been told that the limit is tight declares each release. Any other may by
  -- now use nothing of its grant.
  local idle = tight and grant - in_use or grant

  if grant > 0 or unmet > 0 then
    local lease = {
      granted = grant, in_use = in_use, idle = idle, unmet = unmet, ends = now + lease_ms,
    }
    count(totals, lease, 1)
    redis.call('HSET', key, me,
      text(grant, in_use, idle, unmet, lease.ends, number, since, now))
  elseif mine then
    redis.call('HDEL', key, me)
  end
  if totals.processes > 0 then
    redis.call('HSET', key, 'T', text(totals.granted, totals.in_use, totals.idle, totals.unmet,
      totals.processes, totals.first_end, totals.last_end))
    -- Not the lease of this process: others may have longer ones.
    redis.call('PEXPIRE', key, text(totals.last_end - now))
  else
    redis.call('DEL', key)
  end

  if not learning then
    -- Grants that may be unused are called back for a demand, or to end what exceeds the limit.
    if spare > 0 and (unmet > 0 or overcommitted) then
      local holders = {}
      for _, lease in ipairs(others or leases_of(key)) do
        if lease.process ~= me and lease.idle > 0 then
          holders[#holders + 1] = lease
        end
      end
      table.sort(holders, function(a, b) return a.idle > b.idle end)
      notify(holders, NOTICES, 'recall ' .. name)
    end
    if left > 0 and others_wait then
      table.sort(unmet_of_others, function(a, b) return a.since < b.since end)
      notify(unmet_of_others, left, 'wake ' .. name)
    end
  end

  local flags = (others_wait and 1 or 0) + (tight and 2 or 0) + (overcommitted and 4 or 0)
  return {0, grant, limit, flags, spare, totals.in_use, totals.processes}
end

local reply = {now, learning and 1 or 0}
for i = 1, (#KEYS - 1) / 2 do
  reply[i + 2] = answer(KEYS[2 * i], KEYS[2 * i + 1], 8 * i - 1)
end
return reply
